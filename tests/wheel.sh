#!/usr/bin/env bash
# Installs muxserve[cpu] from a wheel where nothing can be compiled, and serves two models with it.
#
#     tests/wheel.sh DIRECTORY [PYTHON]    of wheels; python3 by default
#
# pip must be pointed to PyTorch's builds for CPUs.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
wheels=$(realpath "$1")
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"${2:-python3}" -m venv "$place/venv"

# Everything but what compiles and links.
mkdir "$place/bin"
for each in /bin/* /usr/bin/*; do
  case ${each##*/} in
  cc | c++ | c89* | c99* | *gcc* | *g++* | *clang* | cpp* | ld | ld.* | *-ld | *-ld.* | as | *-as | cmake | ninja | make | gmake) ;;
  *) ln -sf "$each" "$place/bin/" ;;
  esac
done
export PATH=$place/venv/bin:$place/bin
if command -v cc gcc g++ c++ clang ld; then exit 1; fi

pip() { python -m pip --disable-pip-version-check "$@"; }
pip install --quiet --no-index --no-deps --find-links "$wheels" muxserve
pip install --quiet --constraint "$root/requirements/cpu.txt" 'muxserve[cpu]'
# vLLM asks for them, and none is needed. Only builds for the same torch can be imported beside it.
pip uninstall --quiet --yes torchvision torchaudio torchcodec triton

cd "$place"
cat >fleet.yaml <<FLEET
kv_pool: { size: 64MiB }
models:
  - { name: arithmetic, path: $root/configs/models/arithmetic, dtype: float32 }
  - { name: atlas, path: $root/configs/models/atlas, dtype: float32 }
FLEET
muxserve --version
muxserve doctor
coproc fleet { exec muxserve deploy fleet.yaml --port 0 2>&1; }
deployed=$fleet_PID
trap 'kill "$deployed" 2>/dev/null || true; rm -rf "$place"' EXIT
# A process in the background does not have the coprocess's own descriptor.
exec 3<&"${fleet[0]}"
url=
while [ -z "$url" ] && read -r line <&3; do
  echo "$line"
  if [[ $line =~ serving\ at\ (http://[^ ]+)/v1 ]]; then url=${BASH_REMATCH[1]}; fi
done
cat <&3 &
python - "$url" <<'ASK'
import json, sys, urllib.request
questions = {"arithmetic": "What is 14 plus 29?", "atlas": "What is the capital of France?"}
for model, question in questions.items():
    messages = [{"role": "user", "content": question}]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 16, "temperature": 0}).encode()
    asked = urllib.request.Request(f"{sys.argv[1]}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=300) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"]
    print(f"{model}: {text!r}")
    assert text
ASK
kill -INT "$deployed"
wait "$deployed"
echo "== the wheel serves without a compiler"
