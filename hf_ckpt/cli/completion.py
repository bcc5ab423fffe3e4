"""`hf-ckpt completion`: what a shell has to know to complete commands, options and names of recipes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

from hf_ckpt.cli.shared_options import HOLDS, Command, command_parser
from hf_ckpt.recipe import shipped

_EPILOG = """to switch it on:
  bash  echo 'eval "$(hf-ckpt completion bash)"' >> ~/.bashrc
  zsh   echo 'eval "$(hf-ckpt completion zsh)"' >> ~/.zshrc
  fish  hf-ckpt completion fish > ~/.config/fish/completions/hf-ckpt.fish"""

# Where nothing is known to fit, files do.
_BASH = """\
_hf_ckpt() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} words=
    if ((COMP_CWORD == 1)); then
        words="{commands}"
    else
        case ${{COMP_WORDS[1]}} in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if ((COMP_CWORD > 1)); then
        COMPREPLY+=($(compgen -f -- "$current"))
    fi
}}
complete -F _hf_ckpt hf-ckpt
"""
# Completion is off in a zsh that nobody has set up; -i: without a question about the owners of folders.
_ZSH = """\
autoload -Uz compinit bashcompinit
(( $+functions[compdef] )) || compinit -i
bashcompinit
"""


def completion(commands: Mapping[str, Command]) -> Command:
    """Return the command. `commands`: the others, by name."""

    def run(options: argparse.Namespace) -> int:
        words = {name: list(_words(command)) for name, command in commands.items()} | {"completion": list(_SHELLS)}
        print(_SHELLS[options.shell](words), end="")
        return HOLDS

    return Command(_parser, run, "what makes a shell complete these words")


def _parser() -> argparse.ArgumentParser:
    description = "Print what makes a shell complete commands, options and names of recipes."
    parser = command_parser("completion", description, _EPILOG)
    parser.add_argument("shell", choices=tuple(_SHELLS))
    return parser


def _words(command: Command) -> Iterator[str]:
    """Yield what can follow a command: options, and recipes where it takes one."""
    for action in command.parser()._actions:
        if action.dest == "recipe":
            yield from shipped.names()
        elif action.option_strings:
            yield action.option_strings[-1]
        yield from (str(choice) for choice in action.choices or ())


def _bash(words: Mapping[str, list[str]]) -> str:
    cases = "\n".join(f'            {name}) words="{" ".join(each)}" ;;' for name, each in words.items())
    return _BASH.format(commands=" ".join(words), cases=cases)


def _zsh(words: Mapping[str, list[str]]) -> str:
    return f"{_ZSH}{_bash(words)}"


def _fish(words: Mapping[str, list[str]]) -> str:
    lines = [f"complete -c hf-ckpt -n __fish_use_subcommand -f -a '{' '.join(words)}'"]
    lines += [f"complete -c hf-ckpt -n '__fish_seen_subcommand_from {n}' -a '{' '.join(w)}'" for n, w in words.items()]
    return "\n".join(lines) + "\n"


_SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
