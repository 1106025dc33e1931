//! Opening a checkpoint: headers, config and tokenizer alone, and with every weight looked at.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use model::{Checkpoint, OpenOptions};

fn open(c: &mut Criterion) {
    let mut group = c.benchmark_group("open");
    for (name, folder) in [("demo", "model/demo"), ("four shards", "tests/golden/separate_f16_sharded")] {
        let dir = benches::repository().join(folder);
        let bytes = Checkpoint::open(&dir).unwrap_or_else(|e| panic!("{e}")).stored_bytes();
        for (what, check_finite) in [("headers", false), ("every weight", true)] {
            if check_finite {
                group.throughput(Throughput::Bytes(bytes));
            }
            group.bench_function(format!("{name}, {what}"), |b| {
                b.iter(|| Checkpoint::open_with(&dir, OpenOptions { check_finite }));
            });
        }
    }
    group.finish();
}

criterion_group!(checkpoint, open);
criterion_main!(checkpoint);
