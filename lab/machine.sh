# Sourced by build.sh and run.sh: sets `vm`, the virtual machine to take, to uml or qemu.
#
# NETLAYER_LAB_VM says which; without it, User-Mode Linux, and QEMU where the processor has AMX (Sapphire Rapids and later):
# User-Mode Linux 6.1 keeps 2,696 bytes for a process' extended registers, which is AVX-512 and no more, and the machine
# panics with its first process ("userspace - ptrace set fp regs failed, errno = 14"), for there they are 11,008. To keep
# more takes more than a larger array: each signal handler of that kernel has one such set on its stack.
vm=${NETLAYER_LAB_VM:-}
if [ -z "$vm" ]; then
  vm=uml
  if grep -qw amx_tile /proc/cpuinfo; then
    vm=qemu
    echo "lab: this processor has AMX, whose registers User-Mode Linux 6.1 cannot hold: QEMU in its place, which is slower" >&2
  fi
fi
