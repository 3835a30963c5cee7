"""The functions of bash that both kinds of script begin with: how they write a file, how they run a program."""

FUNCTIONS = """\
set -euo pipefail
fail() { echo "error: $*" >&2; exit 1; }
put() {
  local now
  [ -f "$1" ] || fail "$1 is not there: this driver has no such setting"
  echo "$1: $(cat -- "$1") -> $2"
  printf '%s\\n' "$2" > "$1"
  now=$(cat -- "$1")
  [[ $now =~ ^(0x[0-9a-fA-F]+|[0-9]+)$ ]] && [ "$((now))" -eq "$2" ] || fail "$1 does not hold $2"
}
run() {
  local code=0
  echo "run: $*"
  "$@" < /dev/null || code=$?
  [ "$code" -eq 0 ] || [ "$1 $code" = "ethtool 78" ] || fail "exit code $code of: $*"  # 78: it was so already
}
"""
