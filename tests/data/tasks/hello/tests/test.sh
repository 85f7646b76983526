#!/bin/sh
# file 0.3, text 0.5, clean 0.2; nothing of the workspace is executed.
PATH=/usr/bin:/bin
file=0 text=0 clean=0
if [ -f /app/greeting.txt ] && [ ! -L /app/greeting.txt ]; then
    file=1
    [ "$(cat /app/greeting.txt)" = HELLO ] && text=1
    [ ! -L /app/notes.md ] && cmp -s /tests/initial/notes.md /app/notes.md && clean=1
fi
tenths=$((3 * file + 5 * text + 2 * clean))
printf '{"reward": %d.%d, "file": %d, "text": %d, "clean": %d}\n' \
    $((tenths / 10)) $((tenths % 10)) $file $text $clean > /logs/verifier/reward.json
