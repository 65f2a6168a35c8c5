#!/usr/bin/env bash
# scripts/install_packages.sh   Installs what the build and the tests need from the distribution (Debian 12, 13, Ubuntu 24.04).
# Does nothing when everything is there. Needs root, or sudo.
set -euo pipefail

packages=(g++ cmake make git libdnnl-dev nlohmann-json3-dev libfmt-dev libxxhash-dev libpcre2-dev zlib1g-dev libutf8proc-dev libopenmpi-dev openmpi-bin catch2 "$@")

missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || { echo "please install as root: apt-get install ${missing[*]}" >&2; exit 2; }
    as_root=(sudo)
fi
echo "installing ${missing[*]} ..."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"${as_root[@]}" apt-get update -q >"$log" 2>&1 || { tail -5 "$log" >&2; echo "apt-get update failed" >&2; exit 2; }
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}" >"$log" 2>&1 ||
    { tail -5 "$log" >&2; echo "apt-get could not install ${missing[*]}" >&2; exit 2; }
