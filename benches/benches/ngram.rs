//! The serial n-gram algorithm, which the kernel replaces, on batches of the published benchmark.

use benches::ngram::{Hit, Published};
use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

fn serial(c: &mut Criterion) {
    let mut group = c.benchmark_group("ngram_match, serial");
    // Cases with a match come first: once a group's throughput is set, it stays set.
    for (batch, length, hit) in
        [(32, 512, Hit::PromptLate), (16, 16_384, Hit::PromptEarly), (32, 512, Hit::None), (16, 16_384, Hit::None)]
    {
        let published = Published { batch, length, threshold: 1024, hit };
        let inputs = published.inputs::<i64>();
        if hit == Hit::None {
            // Only without a match is every token read.
            group.throughput(Throughput::Bytes(published.bytes()));
        }
        let name = format!("batch {batch}, length {length}");
        group.bench_function(BenchmarkId::new(name, hit.name()), |b| {
            b.iter_batched_ref(|| inputs.before(), |outcome| inputs.run_serial(outcome), BatchSize::LargeInput);
        });
    }
    group.finish();
}

criterion_group!(ngram, serial);
criterion_main!(ngram);
