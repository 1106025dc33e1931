xz -dc dist/p.tar.xz | tar x -C /tmp; cd /tmp
./wd bench ceilings 2>&1 | grep -i -E 'bulk|read' | head -2
b() { echo "$1 $2 $(./wd bench decode --weights $2 --rows 1,2,8,16 --context $4 $3 2>&1 | grep 'context' | awk '{for(i=1;i<=NF;i++) if($i=="µs"){print $(i-1)}}' | tr '\n' ' ')"; }
for round in 1 2; do for w in int4 packed plain; do b hoist $w "" 128; done; done
./wd bench decode --weights int4 --rows 1,16 --context 128 2>&1 | grep context
