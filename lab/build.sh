#!/usr/bin/env bash
# Build the lab's virtual machine: a User-Mode Linux kernel with rdma_rxe built in, and a small Debian root file system.
#
# usage: lab/build.sh [kernel|root|python|all|qemu]    each part is kept and built once
#
# The default is `all`, or `qemu` where the processor has AMX (see machine.sh). `qemu` is also for hosts where the kernel
# cannot be compiled: QEMU and Debian's own kernel in its place, three parts slower.
#
# Everything lands in $NETLAYER_LAB (~/.cache/netlayer/lab). No root is needed: packages are fetched by apt-get into
# that folder and unpacked there, none is installed. Needs Debian 12 or newer with its package lists (apt-get update), gcc, make, bc.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
lab=${NETLAYER_LAB:-$HOME/.cache/netlayer/lab}
jobs=${NETLAYER_LAB_JOBS:-2}
python=${PYTHON:-python3}
kernel_packages=(linux-source-6.1 flex bison)
root_packages=(python3 python3-pyverbs rdma-core ibverbs-providers ibverbs-utils iproute2 tcpdump libstdc++6 busybox-static bash coreutils)
# In the order in which they are loaded, with what they need; rxe needs the first without saying so.
qemu_modules=(crc32_generic crc32_pclmul rdma_rxe ib_uverbs rdma_ucm veth bridge sch_netem sch_tbf sch_ingress cls_matchall act_gact 9p 9pnet_virtio virtio_pci af_packet)
# Only a pyverbs for Python 3.11 is in Debian 12, so this release and no other.
release=bookworm

fail() { echo "error: $1; $2" >&2; exit "${3:-2}"; }

need() {
  for tool in "$@"; do
    command -v "$tool" >/dev/null || fail "$tool is not on the PATH" "on Debian run: apt-get install build-essential bc xz-utils" 3
  done
}

# fetch FOLDER PACKAGE...: the packages and all they depend on, as if nothing were installed, unpacked into FOLDER.
fetch() {
  local folder=$1; shift
  local state=$lab/state
  mkdir -p "$lab/debs/partial" "$state/partial"; : > "$state/status"
  local options=(-q -y --no-install-recommends -o "Dir::State::status=$state/status" -o "Dir::Cache::pkgcache="
    -o "Dir::Cache::srcpkgcache=" -o Debug::NoLocking=1 -o APT::Sandbox::User=)
  # Of packages that lie in the archive folder no address is printed, so the list is made for an empty one.
  apt-get "${options[@]}" -o "Dir::Cache::archives=$state" --print-uris install "$@" > "$state/uris" 2> "$state/errors" \
    || fail "apt-get knows no $* ($(tail -n 1 "$state/errors"))" "run apt-get update with Debian $release among its sources"
  apt-get "${options[@]}" -o "Dir::Cache::archives=$lab/debs" --download-only install "$@" > "$state/log" 2>&1 \
    || fail "packages cannot be fetched ($(tail -n 1 "$state/log"))" "see $state/log, and whether the mirror can be reached"
  mkdir -p "$folder"
  sed -nE "s/^'[^']*' ([^ ]+\.deb) .*/\1/p" "$state/uris" | while read -r deb; do
    # Not dpkg-deb -x, which puts folders in the place of links such as /bin.
    dpkg-deb --fsys-tarfile "$lab/debs/$deb" | tar -x --keep-directory-symlink -C "$folder" || fail "$lab/debs/$deb cannot be unpacked" "remove it and build again"
  done
}

build_kernel() {
  [ -x "$lab/linux" ] && cmp -s "$here/kernel.config" "$lab/kernel.config" && return
  need apt-get dpkg-deb gcc make bc xz
  echo "kernel: fetching its source" >&2
  local tools=$lab/tools source=$lab/source log=$lab/kernel.log
  rm -rf "$tools" "$source"
  fetch "$tools" "${kernel_packages[@]}"
  mkdir -p "$source"
  tar -xf "$tools"/usr/src/linux-source-6.1.tar.xz -C "$source" --strip-components=1
  rm "$tools"/usr/src/linux-source-6.1.tar.xz
  # These three alone, not the linker and C library that come with them: the host's own are for its compiler.
  mkdir "$tools/path" && ln -s "$tools"/usr/bin/{flex,bison,m4} "$tools/path"
  export PATH=$tools/path:$PATH M4=$tools/usr/bin/m4 BISON_PKGDATADIR=$tools/usr/share/bison
  echo "kernel: compiling with $jobs jobs, about ten minutes; see $log" >&2
  compile "$source" > "$log" 2>&1 || fail "the kernel does not build ($(tail -n 1 "$log"))" "see $log" 1
  strip -o "$lab/linux.part" "$source/linux" && mv "$lab/linux.part" "$lab/linux" && cp "$here/kernel.config" "$lab/"
  rm -rf "$source" "$tools" "$lab/debs"
}

# In a shell of its own: what comes after must not stand in a folder that build_kernel removes. Joined by && throughout:
# bash forgets `set -e` where somebody asks how a function ended.
compile() (
  cd "$1" \
    && sed -i '/^config HZ$/,/default/ s/default 100$/default 1000/' arch/um/Kconfig \
    && make ARCH=um defconfig \
    && scripts/kconfig/merge_config.sh -m .config "$here/kernel.config" \
    && make ARCH=um olddefconfig \
    && takes_all_options \
    && nice make ARCH=um -j"$jobs" linux
)

takes_all_options() {
  local option
  while read -r option; do
    grep -qxF "$option" .config || { echo "its configuration does not take: $option"; return 1; }
  done < <(grep -E '^CONFIG_|is not set$' "$here/kernel.config")
}

build_root() {
  [ -s "$lab/base.cpio" ] || build_base
  # Of two archives behind one another the kernel unpacks both: ours is small and made anew each time.
  mkdir -p "$lab/ours"
  install -m 755 "$here/init" "$lab/ours/init"
  pack "$lab/ours" "$lab/ours.cpio"
  cat "$lab/base.cpio" "$lab/ours.cpio" > "$lab/root.part" && mv "$lab/root.part" "$lab/root.cpio"
  rm -rf "$lab/ours" "$lab/ours.cpio"
}

build_base() {
  need apt-get dpkg-deb tar
  echo "root: fetching its packages" >&2
  local root=$lab/root
  rm -rf "$root"
  # Debian 12 has /bin and its sisters as links into /usr, and its packages still name them.
  mkdir -p "$root"/usr/{bin,sbin,lib,lib64} "$root"/{dev,proc,sys,tmp,run,etc,mnt,repository,python,out}
  for name in bin sbin lib lib64; do ln -s "usr/$name" "$root/$name"; done
  fetch "$root" "${root_packages[@]}"
  [ -x "$root/usr/bin/python3.11" ] || fail "the packages have no Python 3.11" "give apt-get Debian $release among its sources, and no newer release"
  rm -rf "$root"/usr/share/{doc,man,info,locale,perl,zoneinfo,i18n,lintian,bug,bash-completion} "$root"/usr/share/perl* "$root"/usr/bin/perl* \
    "$root"/usr/lib/x86_64-linux-gnu/{gconv,perl,perl-base} "$root"/usr/lib/{systemd,udev} "$root"/var/cache
  # tcpdump wants to find itself and root in them.
  printf 'root:x:0:0:root:/:/bin/bash\ntcpdump:x:100:100::/:/bin/false\n' > "$root/etc/passwd"
  printf 'root:x:0:\ntcpdump:x:100:\n' > "$root/etc/group"
  echo '127.0.0.1 localhost lab' > "$root/etc/hosts"
  cp "$root/bin/busybox" "$lab/busybox"
  pack "$root" "$lab/base.cpio"
  rm -rf "$root" "$lab/debs"
}

# pack FOLDER FILE: an archive as the kernel unpacks it at boot, everything owned by root.
pack() {
  (cd "$1" && find . | "$lab/busybox" cpio -o -H newc -R 0:0) > "$2.part" 2> "$lab/state/cpio" \
    || fail "$1 cannot be packed ($(tail -n 1 "$lab/state/cpio"))" "see $lab/state/cpio" 1
  mv "$2.part" "$2"
}

build_qemu() {
  [ -s "$lab/modules.cpio" ] && return
  need apt-get dpkg-deb tar awk
  local qemu=$lab/qemu modules=$lab/modules version module
  echo "qemu: fetching it and Debian's kernel" >&2
  rm -rf "$qemu" "$modules"
  fetch "$qemu" qemu-system-x86 seabios linux-image-amd64 kmod
  version=$(cd "$qemu/lib/modules" && ls -d 6.1.*-amd64 | tail -n 1)
  cp "$qemu/boot/vmlinuz-$version" "$lab/vmlinuz"
  run_in "$qemu" bin/kmod_depmod -b "$qemu" "$version" || fail "the modules of $version cannot be listed" "remove $qemu and build again" 1
  mkdir -p "$modules/modules"
  for module in "${qemu_modules[@]}"; do
    run_in "$qemu" bin/kmod_modprobe -d "$qemu" -S "$version" --show-depends "$module"
  done > "$lab/state/modules" 2> "$lab/state/errors" || fail "$version lacks a module ($(tail -n 1 "$lab/state/errors"))" "see qemu_modules in lab/build.sh" 1
  sed -nE 's/^insmod ([^ ]+).*/\1/p' "$lab/state/modules" | awk '!seen[$0]++' | while read -r module; do
    cp "$module" "$modules/modules/" && basename "$module" >> "$modules/modules/order"
  done
  pack "$modules" "$lab/modules.cpio"
  rm -rf "$modules" "$lab/debs" "$qemu"/{boot,lib/modules,usr/share/doc}
}

# run_in FOLDER PROGRAM ARGUMENT...: a program of an unpacked tree, with that tree's own C library.
run_in() {
  local folder=$1 program=$2; shift 2
  local name=
  case $program in bin/kmod_*) name=${program#bin/kmod_}; program=bin/kmod ;; esac
  "$folder/lib64/ld-linux-x86-64.so.2" --library-path "$folder/lib/x86_64-linux-gnu:$folder/usr/lib/x86_64-linux-gnu" \
    ${name:+--argv0 "$name"} "$folder/$program" "$@"
}

# The guest has Debian's Python 3.11; what its tests need beside comes as wheels, of the versions that we pin.
build_python() {
  [ -d "$lab/python" ] && [ "$lab/python" -nt "$here/../constraints.txt" ] && return
  echo "python: fetching wheels" >&2
  local platforms=()
  for tag in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do platforms+=(--platform "${tag}_x86_64"); done
  rm -rf "$lab/python.part"
  "$python" -m pip install -q --disable-pip-version-check --no-compile --target "$lab/python.part" --only-binary=:all: --python-version 3.11 \
    --implementation cp "${platforms[@]}" -c "$here/../constraints.txt" click hypothesis numpy psutil pytest pytest-timeout rich scapy \
    > "$lab/state/pip" 2>&1 || fail "wheels cannot be fetched ($(tail -n 1 "$lab/state/pip"))" "see $lab/state/pip"
  rm -rf "$lab/python"
  mv "$lab/python.part" "$lab/python"
  touch "$lab/python"
}

mkdir -p "$lab/state"
if [ $# -eq 0 ]; then
  source "$here/machine.sh"
  case $vm in
    uml) set -- all ;;
    *) set -- "$vm" ;;
  esac
fi
case $1 in
  kernel | root | python) "build_$1" ;;
  all) build_kernel; build_root; build_python ;;
  qemu) build_root; build_python; build_qemu ;;
  *) fail "lab/build.sh $1: there is no such part" "kernel, root, python, all or qemu" ;;
esac
