//! Between text and tokens: the tokenizer both ways, and the chat template.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use model::{Message, Role};

/// The longest beginning of `text` that has at most `bytes` bytes.
fn start(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}

fn tokenizer(c: &mut Criterion) {
    let tokenizer = benches::demo().tokenizer;
    let text = benches::text();
    let mut group = c.benchmark_group("tokenizer");
    for bytes in [256, 4 << 10, 64 << 10] {
        let text = start(&text, bytes);
        group.throughput(Throughput::Bytes(text.len() as u64));
        group.bench_with_input(BenchmarkId::new("encode", text.len()), text, |b, text| {
            b.iter(|| tokenizer.encode(black_box(text)));
        });
        let ids = tokenizer.encode(text).expect("the text encodes");
        group.bench_with_input(BenchmarkId::new("decode", text.len()), &ids, |b, ids| {
            b.iter(|| tokenizer.decode(black_box(ids)));
        });
        // One token at a time, as an answer is printed.
        group.bench_with_input(BenchmarkId::new("stream", text.len()), &ids, |b, ids| {
            b.iter(|| {
                let mut stream = tokenizer.stream();
                let shown: usize = ids.iter().filter_map(|&id| stream.push(id)).map(|text| text.len()).sum();
                shown + stream.flush().map_or(0, |text| text.len())
            });
        });
    }
    group.finish();
}

fn chat_template(c: &mut Criterion) {
    let template = benches::demo().chat_template.expect("the demo model has a chat template");
    let text = benches::text();
    let mut group = c.benchmark_group("chat template");
    for turns in [1, 8, 64] {
        let messages: Vec<Message> = (0..2 * turns - 1)
            .map(|i| Message::new(if i % 2 == 0 { Role::User } else { Role::Assistant }, start(&text, 400)))
            .collect();
        group.throughput(Throughput::Elements(messages.len() as u64));
        group.bench_with_input(BenchmarkId::new("render", messages.len()), &messages, |b, messages| {
            b.iter(|| template.render(black_box(messages), true, true));
        });
    }
    group.finish();
}

criterion_group!(text, tokenizer, chat_template);
criterion_main!(text);
