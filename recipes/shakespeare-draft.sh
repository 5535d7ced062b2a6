#!/bin/sh
# The built-in model `shakespeare-draft`: 2 layers, 128 wide, first trained on the text, then distilled
# from `shakespeare` on sequences that it generates, which raises the acceptance rate (docs/builtin-models.md).
# Usage: recipes/shakespeare-draft.sh TINYSHAKESPEARE.TXT OUT [TARGET]   (OUT/text holds the first model)
set -eu
target="${3:-shakespeare}"
# glibc gives large tensors back to the kernel at every step and faults them in again: 2.6 times slower.
export MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TRIM_THRESHOLD_=16000000000 MALLOC_TOP_PAD_=300000000
nanoinfer train --data "$1" --out "$2/text" --tokenizer "$target" \
  --n-layer 2 --n-head 2 --n-embd 128 --block-size 512 --dropout 0.1 \
  --batch-size 8 --max-steps 3000 --warmup-steps 100 --learning-rate 2e-3 --min-learning-rate 1e-4 \
  --eval-interval 100 --autocast bfloat16 --save-dtype float16
exec nanoinfer train --data "$1" --out "$2" --init "$2/text" --distill "$target" --distill-tokens 1500000 \
  --block-size 512 --batch-size 4 --max-steps 10000 --warmup-steps 100 \
  --learning-rate 2e-3 --min-learning-rate 2e-5 \
  --eval-interval 250 --autocast bfloat16 --save-dtype float16
