#!/bin/sh
# nanoGPT's documented CPU run: character-level Shakespeare, validation loss 1.88 there.
# Usage: recipes/shakespeare-char.sh TINYSHAKESPEARE.TXT OUT
set -eu
exec nanoinfer train --data "$1" --out "$2" --tokenizer char \
  --n-layer 4 --n-head 4 --n-embd 128 --block-size 64 --batch-size 12 --max-steps 2000 \
  --learning-rate 3e-3
