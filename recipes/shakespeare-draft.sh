#!/bin/sh
# The built-in model `shakespeare-draft`: 2 layers, 128 wide, the tokenizer of `shakespeare`.
# Usage: recipes/shakespeare-draft.sh TINYSHAKESPEARE.TXT OUT [TOKENIZER]
set -eu
exec nanoinfer train --data "$1" --out "$2" --tokenizer "${3:-shakespeare}" \
  --n-layer 2 --n-head 2 --n-embd 128 --block-size 512 --dropout 0.1 \
  --batch-size 8 --max-steps 3000 --warmup-steps 100 --learning-rate 2e-3 --min-learning-rate 1e-4 \
  --eval-interval 100 --autocast bfloat16 --save-dtype float16
