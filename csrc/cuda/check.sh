#!/bin/bash
# Compile the CUDA sources for every architecture that is built for, as strictly as they can be; no GPU is needed.
# Prints each kernel's registers, and fails where one spills.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
nvcc=${NVCC:-$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")}
if ! command -v "$nvcc" >/dev/null; then
  echo "check.sh: no nvcc: set NVCC or CUDA_HOME, or put it on PATH" >&2
  exit 1
fi

targets=()
for architecture in 75 80 86 89 90; do
  targets+=("-gencode=arch=compute_$architecture,code=sm_$architecture")
done
targets+=("-gencode=arch=compute_90,code=compute_90")

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
start=$SECONDS
for source in "$here"/*.cu; do
  log=$folder/$(basename "$source").log
  object=$folder/$(basename "$source").o
  if ! "$nvcc" --threads 0 -O3 --fmad=false -std=c++17 -Werror all-warnings \
    -Xcompiler=-Wall,-Wextra,-Werror,-Wno-unknown-pragmas -Xptxas=-v "${targets[@]}" -c "$source" -o "$object" >"$log" 2>&1; then
    cat "$log" >&2
    exit 1
  fi
  # One line per kernel: its name, then "architecture:registers" or "architecture:registers+spilt bytes".
  c++filt <"$log" | awk '
    /Compiling entry function/ {
      architecture = $NF; gsub(/[^0-9]/, "", architecture)
      name = $0
      gsub(/.*entry function .|void |gact::|cuda::|\(anonymous namespace\)::/, "", name)
      gsub(/\(Rounding\)/, "rounding ", name)
      sub(/\(.*/, "", name)
    }
    /bytes spill stores/ { match($0, /[0-9]+ bytes spill stores/); spilt = int(substr($0, RSTART)) }
    /Used [0-9]+ registers/ {
      match($0, /Used [0-9]+/)
      cell = architecture ":" substr($0, RSTART + 5, RLENGTH - 5)
      if (spilt) { cell = cell "+" spilt; failed = 1 }
      if (!(name in row)) order[++count] = name
      row[name] = row[name] "  " cell
    }
    END {
      for (i = 1; i <= count; ++i) printf "%-44s%s\n", order[i], row[order[i]]
      if (failed) print "check.sh: a kernel spills (architecture:registers+bytes)"
      exit failed
    }'
  echo "$(basename "$source"): $(stat -c %s "$object") bytes"
done
echo "compiled in $((SECONDS - start)) s"
