#!/bin/sh
# The built-in model `shakespeare`: 6 layers, 4 heads of 64, block 512, byte-level BPE of 2,048 tokens.
# Usage: recipes/shakespeare.sh TINYSHAKESPEARE.TXT OUT   (what it gave is in docs/builtin-models.md)
set -eu
exec nanoinfer train --data "$1" --out "$2" --tokenizer bpe --vocab-size 2048 \
  --n-layer 6 --n-head 4 --n-embd 256 --block-size 512 --dropout 0.3 \
  --batch-size 8 --max-steps 2400 --warmup-steps 100 --learning-rate 1e-3 --min-learning-rate 5e-5 \
  --eval-interval 100 --autocast bfloat16 --save-dtype float16
