#!/usr/bin/env bash
# Run a command in the lab's virtual machine, which has two Soft-RoCE devices (rxe0, rxe1) and a cable between them.
#
# usage: lab/run.sh [COMMAND...]        without one: the tests that are marked `rdma`
#
# The repository is there read-only, and is the current folder; what the command writes to /out comes back to
# $NETLAYER_LAB_OUT (./runs/rdma-lab). The machine has no network but that cable. No root is needed. The exit code is the
# command's. NETLAYER_LAB_VM=qemu takes QEMU (lab/build.sh qemu) in place of User-Mode Linux, as machine.sh does by itself
# where the processor has AMX.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
lab=${NETLAYER_LAB:-$HOME/.cache/netlayer/lab}
repository=$(cd "$here/.." && pwd)
out=${NETLAYER_LAB_OUT:-$repository/runs/rdma-lab}

fail() { echo "error: $1; $2" >&2; exit "${3:-2}"; }

case ${1:-} in -h | --help) sed -nE '2,/^set/ s/^# ?//p' "${BASH_SOURCE[0]}"; exit ;; esac
source "$here/machine.sh"
case $vm in
  uml) parts=(linux root.cpio python) build=lab/build.sh ;;
  qemu) parts=(vmlinuz modules.cpio root.cpio qemu python) build='lab/build.sh qemu' ;;
  *) fail "NETLAYER_LAB_VM = $vm: there is no such machine" "uml or qemu" ;;
esac
[ "$(uname -sm)" = "Linux x86_64" ] || fail "this is $(uname -sm)" "the virtual machine is for Linux on x86_64" 3
for part in "${parts[@]}"; do
  [ -e "$lab/$part" ] || fail "$lab/$part is not there" "run: $build"
done
for path in "$repository" "$lab" "$out"; do
  case $path in *[[:space:],]*) fail "$path has a space or comma in it" "the machine cannot be given such a path; move it" ;; esac
done
mkdir -p "$out" || fail "$out cannot be made" "give a folder of yours as NETLAYER_LAB_OUT"
out=$(cd "$out" && pwd)
rm -f "$out/exit_code"
if [ $# -gt 0 ]; then printf '%q ' "$@" > "$out/command"; else
  # Only files that have such tests: the machine has not what the others import.
  files=$(cd "$repository" && grep -rl --include='test_*.py' 'pytest\.mark\.rdma' tests | sort | tr '\n' ' ')
  echo "python3 -m pytest -p no:cacheprovider -m rdma $files" > "$out/command"
fi

uml() {
  # The machine's memory is a file there, which never reaches a disk.
  TMPDIR=/dev/shm exec "$lab/linux" mem=700M initrd="$lab/root.cpio" con0=null,fd:1 con=null ssl=null quiet \
    "lab_repository=$repository" "lab_python=$lab/python" "lab_out=$out"
}

qemu() {
  local tree=$lab/qemu
  cat "$lab/root.cpio" "$lab/modules.cpio" > "$out/initrd"
  share() { echo "-virtfs local,path=$2,mount_tag=$1,security_model=none,id=$1$3"; }
  # -icount: the guest's clock counts its instructions, a nanosecond each, and the host's time only while it idles. So a
  # loaded host makes it slow, but never late: by the host's clock ACKs miss their timers, and what is then sent again
  # fills the queues of a slow NIC. It needs one CPU, as User-Mode Linux has; on two, a right WRITE was once refused.
  # No AVX: Debian 12's QEMU 7.2 emulates some of it wrongly: numpy's argsort left arrays unsorted, and captures fell apart.
  # shellcheck disable=SC2046  # paths without spaces, as checked above
  QEMU_MODULE_DIR=$tree/usr/lib/x86_64-linux-gnu/qemu exec "$tree/lib64/ld-linux-x86-64.so.2" --library-path "$tree/lib/x86_64-linux-gnu:$tree/usr/lib/x86_64-linux-gnu" \
    "$tree/usr/bin/qemu-system-x86_64" -L "$tree/usr/share/qemu" -L "$tree/usr/share/seabios" -accel tcg,thread=single -icount shift=0 -cpu max,-avx,-avx2,-fma,-f16c \
    -smp 1 -m 1536 -nic none -display none -monitor none -serial stdio -no-reboot -kernel "$lab/vmlinuz" -initrd "$out/initrd" \
    -append 'console=ttyS0 quiet panic=-1' $(share repository "$repository" ,readonly=on) $(share python "$lab/python" ,readonly=on) $(share out "$out" '')
}

("$vm") < /dev/null &
machine=$!
# Ctrl-C reaches this script alone: a background process of a script ignores it.
trap 'kill "$machine" 2>/dev/null || true; wait "$machine" 2>/dev/null || true; rm -f "$out/initrd"; echo interrupted >&2; exit 130' INT TERM
wait "$machine" || true
rm -f "$out/initrd"
trap - INT TERM
other=; [ "$vm" = qemu ] || other=', or take the other machine: lab/build.sh qemu, then NETLAYER_LAB_VM=qemu'
[ -s "$out/exit_code" ] || fail "the virtual machine ended before its command did" "see what it printed above$other" 1
exit "$(cat "$out/exit_code")"
