#!/bin/sh
# All stages, in this folder. If it is stopped, the same command goes on.   RANKS=2 sh run.sh: with two processes
set -eu
python dial.py
test -f data/done || python prepare.py

stage() { # RECIPE FOLDER: trains or resumes, and exports for from_pretrained
    ddpforge launch "$1.toml" --nproc "${RANKS:-1}"
    ddpforge export "$1" -o "$2/" --force
}
stage pretrain base
stage sft chat
stage dpo preferred
stage grpo nano
python score.py
