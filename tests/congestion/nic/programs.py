"""The programs that set NICs, made of files: in this process, and as scripts for `--tools`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from congestion.nic.vendors.tools import ToolFailed, Tools

_SWITCHES = {
    "roce_adp_retrans_field_select": "roce_adp_retrans_en",
    "roce_tx_window_field_select": "roce_tx_window_en",
    "roce_slow_restart_field_select": "roce_slow_restart_en",
    "roce_slow_restart_idle_field_select": "roce_slow_restart_idle_en",
    "min_ack_timeout_limit_disabled_field_select": "min_ack_timeout_limit_disabled",
    "selective_repeat_forced_en_field_select": "selective_repeat_forced_en",
}
"""Of ROCE_ACCL: a value is taken only beside its select bit."""
PPCC_RANGE = (10, 1000)


class Programs(Tools):
    """All programs at once, in this process; what they set is kept in one file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(host=False)
        self.runs, self.file = True, folder / "programs.json"
        self.told: list[list[str]] = []
        if not self.file.exists():
            self.file.write_text("{}\n")

    def find(self, *names: str) -> str:
        return next((name for name in names if name not in ("mstreg", "mstconfig")), "")

    def run(self, arguments: Sequence[str]) -> str:
        kept: dict[str, Any] = json.loads(self.file.read_text())
        printed = self._answer(list(arguments), kept)
        text = json.dumps(kept, sort_keys=True) + "\n"
        if set(arguments) & {"set", "--set", "-A", "replace", "del"} or (arguments[0] == "mlnx_qos" and arguments[3:]):
            self.told.append(list(arguments))
        if text != self.file.read_text():
            self.file.write_text(text)
        return printed

    def _answer(self, words: list[str], kept: dict[str, Any]) -> str:
        if words[0] == "mlnx_qos":
            return self._mlnx_qos(words[2], words[3:], kept)
        if words[0] == "ethtool":
            if words[1] == "-A":
                kept[f"pause {words[2]}"] = [words[4], words[6]]
            received, sent = kept.get(f"pause {words[2]}", ["on", "on"])
            return f"Pause parameters for {words[2]}:\nAutonegotiate:\toff\nRX:\t\t{received}\nTX:\t\t{sent}\n"
        if words[0] == "dcb":
            return self._dcb([word for word in words[1:] if word != "-N"], kept)
        if words[0] == "mlxreg":
            return self._mlxreg(words, kept)
        if words[0] == "mlxconfig":
            key, _, value = words[-1].partition("=")
            if "set" in words:
                kept[f"{words[2]} {key}"] = value
            return f"Configurations:        Next Boot\n        {key}       {kept.get(f'{words[2]} {key}', 'True(1)')}\n"
        raise ToolFailed(f"{words[0]}: not found")

    def _mlnx_qos(self, netdev: str, rest: list[str], kept: dict[str, Any]) -> str:
        own = kept.setdefault(f"mlnx {netdev}", {"trust": "pcp", "pfc": "0" * 8, "dscp": {}})
        for word in rest:
            name, _, value = word.partition("=")
            if name == "--trust":
                own["trust"] = value
            elif name == "--pfc":
                own["pfc"] = value.replace(",", "")
            else:
                verb, dscp, priority = value.split(",")
                own["dscp"].pop(dscp, None)
                if verb == "set" and int(priority) != int(dscp) // 8:
                    own["dscp"][dscp] = priority
        rows = dict.fromkeys(range(8), "")
        for dscp in range(63, -1, -1):
            rows[int(own["dscp"].get(str(dscp), dscp // 8))] += f"{dscp:02d},"
        lines = ["DCBX mode: OS controlled", f"Priority trust state: {own['trust']}"]
        if own["trust"] != "pcp":  # no map is printed for a port that does not go by it
            lines += ["dscp2prio mapping:"]
            lines += [f"\tprio:{priority} dscp:{values}" for priority, values in rows.items() if values]
        pfc = "   ".join(own["pfc"])
        lines += ["PFC configuration:", "\tpriority    0   1   2   3   4   5   6   7", f"\tenabled     {pfc}   "]
        return "\n".join([*lines, "\tbuffer      0   0   0   1   0   0   0   0   ", ""])

    def _dcb(self, words: list[str], kept: dict[str, Any]) -> str:
        table, verb, netdev, given = words[0], words[1], words[3], words[5:]
        key = f"dcb {table} {netdev}"
        if table == "pfc":
            now = kept.get(key, {str(priority): "off" for priority in range(8)})
            if verb == "set":
                kept[key] = now = now | dict(word.split(":") for word in given)
            return "prio-pfc " + " ".join(f"{priority}:{on}" for priority, on in now.items()) + " \n"
        rules: list[str] = kept.get(key, [])
        if verb == "replace":
            rules = sorted({*(rule for rule in rules if rule.split(":")[0] != given[0].split(":")[0]), *given})
        if verb == "del":
            rules = [rule for rule in rules if rule not in given]
        if rules or key in kept:
            kept[key] = rules
        return "dscp-prio " + " ".join(rules) + " \n" if rules else ""

    def _mlxreg(self, words: list[str], kept: dict[str, Any]) -> str:
        device, register = words[2], words[words.index("--reg_name") + 1]
        if register == "PPCC":
            slot = f"{device} {words[words.index('--indexes') + 1]}"
            command = words[words.index("--set" if "--set" in words else "--op") + 1].removeprefix("cmd_type=")
            if command[0] in "568":
                return self._parameter(f"{slot} value", command, int(slot.rpartition("=")[2]), kept)
            if "--set" in words:
                kept[slot] = words[words.index("--set") + 1] == "cmd_type=1"
            return f"Field Name | Data\n=====\nvalue      | 0x0000000{int(kept.get(slot, True))}\n"
        fields = kept.get(f"{device} accl", dict.fromkeys(_SWITCHES.values(), "0") | {"roce_slow_restart_en": "1"})
        if "--set" in words:
            given = dict(word.split("=") for word in words[words.index("--set") + 1].split(","))
            meant = {_SWITCHES[name] for name, value in given.items() if name in _SWITCHES and value == "1"}
            kept[f"{device} accl"] = fields = fields | {name: given[name] for name in meant}
        rows = [f"{name} | 0x00000001" for name in _SWITCHES]
        rows += [f"{name} | 0x0000000{fields[name]}" for name in _SWITCHES.values()]
        return "\n".join(["Sending access register...", "Field Name | Data", "=====", *rows, ""])

    def _parameter(self, name: str, command: str, index: int, kept: dict[str, Any]) -> str:
        """One of PPCC's four, the last read-only; what is out of range is dropped in silence."""
        if index > 3:
            raise ToolFailed("mlxreg: -E- Failed to send access register: Bad parameter")
        low, high = PPCC_RANGE
        if command == "5":
            fields = {"value": 0, "param_value1": low, "param_value2": low, "param_value3": high, "prm": int(index < 3)}
        else:
            value = int(command.partition("value=")[2] or -1)
            if command[0] == "8" and low <= value <= high and index < 3:
                kept[name] = value
            fields = {"value": kept.get(name, low)}
        return "\n".join(
            ["Field Name | Data", "=====", *(f"{key} | {value:#010x}" for key, value in fields.items()), ""]
        )


_SCRIPT = r"""#!/bin/bash
me=${0##*/}; state=${0%/*}/state; mkdir -p "$state"
kept() { if [ -f "$state/$1" ]; then echo "$(<"$state/$1")"; else echo "$2"; fi; }
keep() { echo "$2" > "$state/$1"; }
case $me in
ethtool)
  [ "$1" = -A ] && keep "pause-$2" "$4 $6"
  read -r rx tx <<< "$(kept "pause-$2" "on on")"
  printf 'Pause parameters for %s:\nAutonegotiate:\toff\nRX:\t\t%s\nTX:\t\t%s\n' "$2" "$rx" "$tx" ;;
mlnx_qos)
  dev=$2; shift 2
  for word; do
    case $word in
    --trust=*) keep "trust-$dev" "${word#*=}" ;;
    --pfc=*) keep "pfc-$dev" "${word#*=}" ;;
    --dscp2prio=*) IFS=, read -r verb dscp prio <<< "${word#*=}"
      if [ "$verb" = set ]; then keep "dscp-$dev-$dscp" "$prio"; else rm -f "$state/dscp-$dev-$dscp"; fi ;;
    esac
  done
  trust=$(kept "trust-$dev" pcp)
  printf 'Priority trust state: %s\n' "$trust"
  [ "$trust" = pcp ] || echo 'dscp2prio mapping:'
  [ "$trust" = pcp ] || for dscp in 26 48; do
    printf '\tprio:%s dscp:%s,\n' "$(kept "dscp-$dev-$dscp" $((dscp / 8)))" "$dscp"
  done
  pfc=$(kept "pfc-$dev" 0,0,0,0,0,0,0,0)
  printf 'PFC configuration:\n\tpriority    0   1   2   3   4   5   6   7\n\tenabled     %s   \n' "${pfc//,/   }" ;;
dcb)
  [ "$1" = -N ] && shift
  key="dcb-$1-$4"
  case "$1 $2" in
  "pfc set") shift 5; keep "$key" "$*" ;;
  "app replace") keep "$key-${6%:*}" "$6" ;;
  "app del") rm -f "$state/$key-${6%:*}" ;;
  esac
  if [ "${key:4:3}" = pfc ]; then
    echo "prio-pfc $(kept "$key" "0:off 1:off 2:off 3:off 4:off 5:off 6:off 7:off") "
  else
    echo "dscp-prio $(cat "$state/$key"-* 2> "$state/none" | tr '\n' ' ')"
  fi ;;
mlxreg)
  for word; do case $word in *_field_select=1,*=*) word=${word#*,}; keep "$2-${word%=*}" "${word#*=}" ;; esac; done
  case $* in *PPCC*)
    case $* in *--set*cmd_type=1*) keep "$2-slot" 1 ;; *--set*cmd_type=2*) keep "$2-slot" 0 ;; esac
    printf 'value | 0x0000000%s\n' "$(kept "$2-slot" 1)"; exit 0 ;;
  esac
  echo "Sending access register..."
  for name in roce_adp_retrans roce_slow_restart; do
    printf '%s_field_select | 0x00000001\n%s_en | 0x0000000%s\n' $name $name "$(kept "$2-${name}_en" 0)"
  done ;;
mlxconfig)
  word=${*: -1}; case $* in *" set "*) keep "$2-${word%=*}" "${word#*=}" ;; esac
  printf 'Configurations:        Next Boot\n        %s       %s\n' "${word%=*}" "$(kept "$2-${word%=*}" "True(1)")" ;;
esac
exit 0
"""


def install_programs(folder: Path) -> Path:
    """Some of the programs as real ones, for `--tools`: they keep what they are told in files beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("dcb", "mlnx_qos", "mlxreg", "mlxconfig", "ethtool"):
        (folder / name).write_text(_SCRIPT)
        (folder / name).chmod(0o755)
    return folder
