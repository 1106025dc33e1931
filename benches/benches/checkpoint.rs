//! Opening a checkpoint: with headers, config and tokenizer alone, and with every weight checked.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use model::{Checkpoint, OpenOptions};

fn open(c: &mut Criterion) {
    for (name, folder) in [("demo", "model/demo"), ("four shards", "tests/golden/separate_f16_sharded")] {
        let dir = benches::repository().join(folder);
        let bytes = Checkpoint::open(&dir).unwrap_or_else(|e| panic!("{e}")).stored_bytes();
        let mut group = c.benchmark_group(format!("open {name}"));
        group.bench_function("headers", |b| {
            b.iter(|| Checkpoint::open_with(&dir, OpenOptions { check_finite: false, ..Default::default() }));
        });
        group.throughput(Throughput::Bytes(bytes));
        group.bench_function("every weight", |b| {
            b.iter(|| Checkpoint::open_with(&dir, OpenOptions::default()));
        });
        group.finish();
    }
}

criterion_group!(checkpoint, open);
criterion_main!(checkpoint);
