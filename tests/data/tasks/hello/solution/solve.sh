#!/bin/sh
set -e
echo HELLO > greeting.txt
