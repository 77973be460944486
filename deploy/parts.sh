#!/usr/bin/env bash
# Installs the real parts that tests run against, if they are missing. Now: Chromium with fonts.
set -euo pipefail

have_browser() { command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; }
have_fonts() { command -v fc-list >/dev/null && [ -n "$(fc-list | head -1)" ]; }

if have_browser && have_fonts; then
    echo "parts: Chromium and fonts are there"
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "parts: Chromium is missing and there is no apt-get; install Chromium and a font with your own package manager" >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "parts: Chromium is missing and installing it needs root: sudo make parts" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends chromium fontconfig fonts-dejavu-core
have_browser && have_fonts && echo "parts: Chromium and fonts installed"
