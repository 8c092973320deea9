#!/bin/bash
# Build the library with GCC's sanitizers beside the installed one, and run the kernels' tests on it. BIN is the
# virtual environment's bin folder.
set -euo pipefail
python=$(realpath -s "$BIN/python")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

folder=$PWD/build/sanitized
GACT_FX_SANITIZE=1 "$BIN/python" setup.py -q build --build-base build/sanitizing --build-lib "$folder"

# The runtime must come first, and what Python itself leaks is not our business.
export LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)"
export ASAN_OPTIONS=detect_leaks=0:log_path=$folder/report UBSAN_OPTIONS=print_stacktrace=1:log_path=$folder/report
export PYTHONPATH=$folder
# pytest holds back what a process says that dies.
rm -f "$folder"/report.*
trap 'cat "$folder"/report.* 2>/dev/null >&2 || true' ERR
# Tests that compile with Inductor or start an interpreter of their own would run other code under the sanitizers.
tests=(tests/codec/test_codec_operators.py tests/codec/test_codec_hypothesis.py tests/graphs/test_draw_mask.py -k "not opcheck and not inductor and not instruction_set and not symbolic")

# Not from here, where the installed package would be found first.
loaded=$(cd "$folder" && "$python" -c "import torch, gact_fx; print(*torch.ops.loaded_libraries)")
[[ $loaded == *"$folder"* ]] || { echo "sanitize.sh: loaded $loaded, which is not the sanitized build" >&2; exit 1; }
pytest=("$BIN/pytest" -q -n auto --dist worksteal -p no:cacheprovider)
"${pytest[@]}" "${tests[@]}"
everywhere=(tests/codec/test_codec_hypothesis.py tests/graphs/test_draw_mask.py -k everywhere)
for capability in avx2 baseline; do
  GACT_FX_CPU_CAPABILITY=$capability "${pytest[@]}" "${everywhere[@]}"
done
