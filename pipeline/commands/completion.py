"""`fleetpulse completion SHELL`: completes commands, verbs, options and their choices in bash, zsh and fish.

The scripts are made from the table of commands, so that they never lag behind it. Ids of incidents are asked of the
pipeline at the key (`fleetpulse completion incidents`), which has a second to answer; without an answer there are none.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from pipeline.commands.arguments import COMMANDS
from pipeline.commands.options import CONFIG, INCIDENT, INCIDENT_IDS
from pipeline.commands.verbs import VERBS

IDS = ("incidents", "resolved")
"""In place of a shell: which ids are listed."""
PATIENCE_S = 0.7
"""Longest wait for the ids (s). Chosen: with the start of the command within a second, after which a key seems lost."""


def list_ids(which: str, path: str | None) -> list[str]:
    """Returns `ID<tab>TITLE` of the incidents that are open, acknowledged or silenced, or of resolved ones; nothing if
    the pipeline does not answer in time, or not at all: at a key there is nobody to read an error."""
    found: list[str] = []
    asked = threading.Thread(target=_ask_ids, args=(which, path, found), daemon=True)
    asked.start()
    asked.join(PATIENCE_S)
    return list(found)


def _ask_ids(which: str, path: str | None, found: list[str]) -> None:
    from pipeline.config.sections import load_config
    from pipeline.http import client
    from pipeline.model.errors import FleetpulseError
    from pipeline.model.plain_text import make_printable

    try:
        config = load_config(path)
        for state in ("resolved",) if which == "resolved" else ("open", "acknowledged", "silenced"):
            status, answer = client.get(config, f"/api/v1/incidents?state={state}", PATIENCE_S)
            rows = sorted(
                answer["incidents"] if status == 200 else [], key=lambda row: str(row["opened"]), reverse=True
            )
            found.extend(f"{row['id']}\t{make_printable(row['summary'])}" for row in rows)
    except (FleetpulseError, OSError, KeyError, TypeError):
        return  # as if it had none


def list_id_places() -> dict[str, tuple[str, bool]]:
    """Returns `command` or `command verb` that takes incidents -> which, and whether several."""
    found = dict[str, tuple[str, bool]]()
    for name, (_, options) in COMMANDS.items():
        for key, own in ((name, options), *((f"{name} {verb}", own) for verb, (_, own) in VERBS.get(name, {}).items())):
            if INCIDENT in own or INCIDENT_IDS in own:
                several = INCIDENT_IDS in own or name == "merge"
                found[key] = ("resolved" if name == "reopen" else "incidents", several)
    return found


def make_script(shell: str) -> str:
    """Returns the script for a shell, to be sourced."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]()


def list_words() -> dict[str, list[str]]:
    """Returns `command` or `command verb` -> the words that may follow it."""
    found: dict[str, list[str]] = {"": [*COMMANDS, "--help", "--version"]}
    for name, (_, options) in COMMANDS.items():
        found[name] = [*VERBS.get(name, ()), *_option_words(options)]
        for verb, (_, own) in VERBS.get(name, {}).items():
            found[f"{name} {verb}"] = _option_words(own)
    return found


def list_choices() -> dict[str, list[str]]:
    """Returns `command option` -> its choices; options whose choices differ between verbs of a command are left out."""
    found: dict[str, list[str]] = {}
    mixed = set()
    for name, (_, options) in COMMANDS.items():
        for own in (options, *(own for _, own in VERBS.get(name, {}).values())):
            for flags, settings in own:
                words = [str(choice) for choice in settings.get("choices", ())]
                for key in (f"{name} {flag}" for flag in flags if flag.startswith("--")):
                    if found.setdefault(key, words) != words:
                        mixed.add(key)
    return {key: words for key, words in found.items() if words and key not in mixed}


def _option_words(options: tuple[tuple[Any, Mapping[str, Any]], ...]) -> list[str]:
    """Returns the options, and the choices of the positional arguments."""
    words: dict[str, None] = {}
    for flags, settings in (*options, CONFIG):
        if flags[0].startswith("-"):
            words |= dict.fromkeys(flags)
        else:
            words |= dict.fromkeys(map(str, settings.get("choices", ())))
    return [*words, "--help"]


def _bash() -> str:
    cases = "\n".join(f'    "{key}") words="{" ".join(words)}" ;;' for key, words in list_words().items())
    choices = "\n".join(f'    "{key}") words="{" ".join(words)}" ;;' for key, words in list_choices().items())
    return f"""# fleetpulse completion for bash: source <(fleetpulse completion bash)
_fleetpulse() {{
  local words="" key="" start="" current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
  case "$current" in  # --option=value: bash splits it at the sign, zsh does not
    =) current="" ;;
    --*=*) previous="${{current%%=*}}"; start="$previous="; current="${{current#*=}}" ;;
    *) [ "$previous" = "=" ] && previous="${{COMP_WORDS[COMP_CWORD-2]}}" ;;
  esac
  case "$previous" in
    --config|--token-file) COMPREPLY=($(compgen -P "$start" -f -- "$current")); return ;;
  esac
  case "${{COMP_WORDS[1]}} $previous" in
{choices}
  esac
  if [ -z "$words" ]; then
    [ "$COMP_CWORD" -gt 1 ] && key="${{COMP_WORDS[1]}}"
    [ "$COMP_CWORD" -gt 2 ] && case "$key ${{COMP_WORDS[2]}}" in
{_verb_cases()}
    esac
    case "$key" in
{cases}
    esac
{_bash_ids()}
  fi
  COMPREPLY=($(compgen -P "$start" -W "$words" -- "$current"))
}}
complete -F _fleetpulse fleetpulse
"""


def _bash_ids() -> str:
    """Returns what adds ids where a word is no option and no value of one."""
    places = list_id_places()
    one = [f'"{key}:{key.count(" ") + 2}"' for key, (_, several) in places.items() if not several]
    many = [f'"{key}:"*' for key, (which, several) in places.items() if several and which == "incidents"]
    resolved = [f'"{key}:"*' for key, (which, _) in places.items() if which == "resolved"]
    return f"""    local ids="" file="" place
    case "$key:$COMP_CWORD" in
      {"|".join(one + many)}) ids=incidents ;;
      {"|".join(resolved)}) ids=resolved ;;
    esac
    case "$current$previous" in -*) ids="" ;; esac
    case "$previous" in -*) ids="" ;; esac
    if [ -n "$ids" ]; then
      for ((place = 1; place < COMP_CWORD; place++)); do
        [ "${{COMP_WORDS[place]}}" = "--config" ] && file="${{COMP_WORDS[place+1]}}"
        [ "$file" = "=" ] && file="${{COMP_WORDS[place+2]}}"
      done
      words="$words $("${{COMP_WORDS[0]}}" completion $ids ${{file:+--config "$file"}} 2>/dev/null | cut -f1)"
    fi"""


def _verb_cases() -> str:
    names = [f'"{name} {verb}"' for name, verbs in VERBS.items() for verb in verbs]
    return f'      {"|".join(names)}) key="$key ${{COMP_WORDS[2]}}" ;;'


def _zsh() -> str:
    return f"""#compdef fleetpulse
# fleetpulse completion for zsh: source <(fleetpulse completion zsh)
autoload -U +X bashcompinit && bashcompinit
{_bash()}"""


def _fish() -> str:
    lines = ["# fleetpulse completion for fish: fleetpulse completion fish | source", "complete -c fleetpulse -f"]
    for name, (text, _) in COMMANDS.items():
        lines.append(f"complete -c fleetpulse -n __fish_use_subcommand -a {name} -d {_quote(text)}")
    for name, verbs in VERBS.items():
        lines += [
            f"complete -c fleetpulse -n '__fish_seen_subcommand_from {name}' -a {verb} -d {_quote(text)}"
            for verb, (text, _) in verbs.items()
        ]
    for name, (_, options) in COMMANDS.items():
        every = [*options, *(o for _, own in VERBS.get(name, {}).values() for o in own), CONFIG]
        lines += list(dict.fromkeys(line for o in every if (line := _fish_option(name, *o))))
    lines += [_fish_ids(*place) for place in list_id_places().items()]
    return "\n".join(lines) + "\n"


def _fish_ids(key: str, place: tuple[str, bool]) -> str:
    seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in key.split())
    return f"complete -c fleetpulse -k -n '{seen}' -a '(fleetpulse completion {place[0]} 2>/dev/null)'"


def _fish_option(name: str, flags: tuple[str, ...], settings: Mapping[str, Any]) -> str:
    """Returns the line of an option, or of the choices of a positional argument."""
    seen = f"complete -c fleetpulse -n '__fish_seen_subcommand_from {name}'"
    words = " ".join(map(str, settings.get("choices", ())))
    if not flags[0].startswith("-"):
        return f"{seen} -a '{words}'" if words else ""
    takes = "" if settings.get("action") == "store_true" else f" -x -a '{words}'" if words else " -r"
    return f"{seen} -l {flags[0].removeprefix('--')}{takes} -d {_quote(str(settings.get('help', '')))}"


def _quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
