#!/bin/sh
# Lets PyTorch's build for CUDA be imported on a CPU without CUDA's libraries, which have gigabytes: an empty function for
# each that PyTorch links with. cudart and cupti are called at the import and are installed (make test-old).
#   tests/helpers/stub_cuda.sh .venv-old/lib/python3.12/site-packages/torch/lib
set -eu
lib=$1
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
nm -D --undefined-only "$lib"/lib*.so | sed -nE 's/.* U ((nccl|cusparseLt|cuFile)\w+|(\w+)@(libcu|NVSHMEM).*)$/\1/p' |
  sed 's/@.*//; s/.*/void &(void) {}/' | sort -u > "$work/stub.c"
for name in $(readelf -d "$lib"/lib*.so | grep -oE 'lib(cu|nccl|nvshmem)[A-Za-z_]*\.so\.[0-9]+' | sort -u); do
  case $name in
    libcudart.* | libcupti.*) continue ;;
    libnvshmem*) version=NVSHMEM ;;
    *) version=$name ;;
  esac
  echo "$version { *; };" > "$work/map"
  gcc -shared -w -fno-builtin -Wl,-soname,"$name",--version-script,"$work/map" -o "$lib/$name" "$work/stub.c"
done
