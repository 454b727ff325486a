#!/bin/sh
# Installs the wheels in build/dist into a fresh environment outside of the clone, and uses them there as their users do:
# the bundled digits recipe on two ranks, a plugin, a recipe that is copied out, and a wheel made of the sdist.
# `make package` builds them first. The Python is that of $PYTHON.
set -eu
dist=$(cd "$(dirname "$0")/../build/dist" && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet "$dist"/ddpforge-*.whl "$dist"/ddpforge_sam-*.whl
PATH=$place/venv/bin:$PATH
export PATH

ddpforge --version
ddpforge doctor --help >/dev/null
ddpforge launch digits --nproc 2 --set train.device=cpu train.length=3ep
ddpforge eval digits --json
ddpforge recipes cp digits
ddpforge check digits.toml --build
ddpforge run digits.toml --set name=sam 'optimizer={use="sam", base="sgd", lr=0.1}' train.device=cpu train.length=2ep
ddpforge status digits >/dev/null

venv/bin/pip install --quiet --no-deps --force-reinstall "$dist"/ddpforge-*.tar.gz
ddpforge run digits --set name=sdist train.device=cpu train.length=2ep
echo "the wheels in $dist train"
