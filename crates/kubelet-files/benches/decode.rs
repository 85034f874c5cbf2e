//! Benchmark: decoding a large checkpoint, compared with serde_json's `Value`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use devlet_kubelet_files::device_plugin;
use divan::Bencher;
use divan::counter::BytesCount;

const ENTRIES: usize = 50_000;

/// A V2 file as a kubelet writes it, with the right checksum.
fn checkpoint() -> Vec<u8> {
    let mut text = String::from("{\"Data\":{\"PodDeviceEntries\":[");
    for index in 0..ENTRIES {
        let response = format!(
            "\n\u{1b}\n\u{a}GPU_DEVICE\u{12}\u{d}/dev/gpu{index:05}\u{1a}\u{16}\n\u{9}/dev/gpu0\u{12}\u{9}/dev/gpu0"
        );
        let separator = if index > 0 { "," } else { "" };
        let answer = STANDARD.encode(response);
        text.push_str(&format!(
            "{separator}{{\"PodUID\":\"{:08x}-5b7c-4a7a-9c0e-3f3a8f1f{:04x}\",\"ContainerName\":\"main\",\
             \"ResourceName\":\"vendor.com/gpu\",\"DeviceIDs\":{{\"{}\":[\"gpu-{index}\"]}},\"AllocResp\":\"{answer}\"}}",
            index * 7_919,
            index % 65_536,
            index % 2,
        ));
    }
    text.push_str("],\"RegisteredDevices\":{\"vendor.com/gpu\":[\"gpu-0\"]}},\"Checksum\":0}");
    let Ok(file) = device_plugin::read(text.as_bytes()) else {
        return Vec::new();
    };
    device_plugin::write(file.unverified()).into_bytes()
}

/// Decodes a file and verifies its checksum.
#[divan::bench]
fn kubelet_files_read(bencher: Bencher<'_, '_>) {
    let bytes = checkpoint();
    bencher
        .counter(BytesCount::of_slice(&bytes))
        .bench_local(|| device_plugin::read(black_box(&bytes)).map(|file| file.verified()));
}

#[divan::bench]
fn serde_json_value(bencher: Bencher<'_, '_>) {
    let bytes = checkpoint();
    bencher
        .counter(BytesCount::of_slice(&bytes))
        .bench_local(|| serde_json::from_slice::<serde_json::Value>(black_box(&bytes)));
}

#[divan::bench]
fn kubelet_files_write(bencher: Bencher<'_, '_>) {
    let bytes = checkpoint();
    let Ok(file) = device_plugin::read(&bytes) else {
        return;
    };
    bencher
        .counter(BytesCount::of_slice(&bytes))
        .bench_local(|| device_plugin::write(black_box(file.unverified())));
}

/// Measures `run`, with and without the time to drop its result.
fn timed<T>(run: impl FnOnce() -> T) -> [Duration; 2] {
    let start = Instant::now();
    let made = black_box(run());
    let without = start.elapsed();
    drop(made);
    [without, start.elapsed()]
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

fn main() {
    divan::main();
    let bytes = checkpoint();
    let (mut ours, mut value) = ([const { Vec::new() }; 2], [const { Vec::new() }; 2]);
    // Alternately, so that both see the same load of the machine.
    for _ in 0..21 {
        let read = timed(|| device_plugin::read(black_box(&bytes)).map(|file| file.verified()));
        let parsed = timed(|| serde_json::from_slice::<serde_json::Value>(black_box(&bytes)));
        for which in 0..2 {
            ours[which].push(read[which]);
            value[which].push(parsed[which]);
        }
    }
    println!("{} bytes, {ENTRIES} entries", bytes.len());
    for (which, what) in ["decoded", "decoded and dropped"].into_iter().enumerate() {
        let (ours, value) = (median(&mut ours[which]), median(&mut value[which]));
        let ratio = ours.as_secs_f64() / value.as_secs_f64();
        println!("{what}: {ours:.1?}, checksum included; serde_json::Value {value:.1?}; ratio {ratio:.2}");
    }
}
