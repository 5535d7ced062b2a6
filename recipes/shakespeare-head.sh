#!/bin/sh
# The built-in draft head `shakespeare-head`: what `shakespeare` says next, from its own hidden state.
# Usage: recipes/shakespeare-head.sh TINYSHAKESPEARE.TXT OUT   (what it gave is in docs/builtin-models.md)
set -eu
exec nanoinfer train --data "$1" --out "$2" --draft-head shakespeare --head-hidden 1024 \
  --distill-tokens 400000 --block-size 512 \
  --batch-size 4 --max-steps 700 --warmup-steps 20 --learning-rate 4e-3 --min-learning-rate 1e-4 \
  --weight-decay 0.01 --eval-interval 100 --eval-tokens 10000 --autocast bfloat16 --save-dtype float16
