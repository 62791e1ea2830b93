#!/bin/bash
# cuda-stubs.sh VENV: lets `pip install --no-deps torch` (the CUDA build) be imported for CPU use without the
# CUDA wheels: one small stub library per missing library name, with the symbols and versions that torch asks for.
set -eu
L=$(echo "$1"/lib/python3*/site-packages/torch/lib); cd "$L"; rm -f libcudastub.so; W=$(mktemp -d)
find . -maxdepth 1 -type l -lname libcudastub.so -delete
for f in lib*.so*; do readelf -d $f | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p'; done | sort -u | grep -E '^lib(cu|nv|nccl)' > $W/need
for f in lib*.so*; do readelf -VW $f 2>/dev/null | awk '/File: /{for(i=1;i<=NF;i++)if($i=="File:")F=$(i+1)} /Name: /{for(i=1;i<=NF;i++)if($i=="Name:")print F, $(i+1)}'; done | sort -u > $W/ver
for f in lib*.so*; do nm -D --undefined-only $f 2>/dev/null; done | awk '{print $2}' | sort -u | grep -E '^_*(cu|nv|nccl|Cu)' > $W/u
for f in lib*.so*; do nm -D --defined-only $f 2>/dev/null; done | awk '{print $3}' | sed 's/@.*//' | sort -u > $W/d
first=1
while read n; do [ -e "$n" ] && continue
  : > $W/s.c; : > $W/s.map; echo 'static int f(void){return 999;}' >> $W/s.c
  grep "^$n " $W/ver | while read _ v; do
    grep "@$v\$" $W/u | sed 's/@.*//' > $W/x || true
    sed 's/.*/int &(void){return f();}/' $W/x >> $W/s.c
    { echo "$v {"; [ -s $W/x ] && { echo " global:"; sed 's/.*/  &;/' $W/x; }; echo "};"; } >> $W/s.map
  done
  if [ $first = 1 ]; then grep -v @ $W/u | comm -23 - $W/d | sed 's/.*/int &(void){return f();}/' >> $W/s.c; first=0; fi
  m=(); [ -s $W/s.map ] && m=(-Wl,--version-script=$W/s.map)
  gcc -shared -fPIC -O1 -w -o $n -Wl,-soname,$n "${m[@]}" $W/s.c && echo "stub $n $(wc -l < $W/s.c) symbols $(grep -c '{' $W/s.map || true) versions"
done < $W/need
rm -rf $W
