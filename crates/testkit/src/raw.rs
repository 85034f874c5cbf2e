//! Peers that do not implement gRPC: the bytes that they send, and a socket that sends them.

use std::io::Write as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};

use crate::PATIENCE;

/// A socket that sends the same bytes on every connection, does not read, and does not close the connection.
#[derive(Debug)]
pub struct Babbler {
    path: PathBuf,
    ends: Arc<AtomicBool>,
    connected: Receiver<()>,
}

impl Babbler {
    /// Starts to listen.
    pub fn at(path: &Path, bytes: Vec<u8>) -> Self {
        let listener = UnixListener::bind(path).expect("the socket can be made");
        let (served, connected) = channel();
        let ends = Arc::new(AtomicBool::new(false));
        let end = Arc::clone(&ends);
        std::thread::spawn(move || {
            let mut open = Vec::new();
            for stream in listener.incoming() {
                if end.load(Ordering::Relaxed) {
                    return;
                }
                let Ok(mut stream) = stream else { return };
                // A client that closes the connection early is fine.
                let _ = stream.set_write_timeout(Some(std::time::Duration::from_millis(100)));
                let _ = stream.write_all(&bytes);
                open.push(stream);
                let _ = served.send(());
            }
        });
        Self {
            path: path.to_owned(),
            ends,
            connected,
        }
    }

    /// Waits until a client has connected, and has received all bytes or closed the connection.
    pub fn until_heard(&self) {
        self.connected.recv_timeout(PATIENCE).expect("a client connects");
    }
}

impl Drop for Babbler {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        // Wakes the thread.
        let _ = UnixStream::connect(&self.path);
        let _ = std::fs::remove_file(&self.path);
    }
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PUSH_PROMISE: u8 = 5;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;

const END_HEADERS: u8 = 4;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len())
        .expect("frames are short")
        .to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// `:method: POST`, `:scheme: http`, `:path: /`.
const POST: &[u8] = &[0x83, 0x86, 0x84];

/// Returns reproducible pseudo-random bytes.
fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    (0..length).map(|_| next()).collect()
}

/// Returns frames after a valid start, by name. A peer should close the connection or tolerate them.
fn frames() -> Vec<(&'static str, Vec<u8>)> {
    let resets = |number: u32| {
        let stream = 2 * number + 1;
        [
            frame(HEADERS, END_HEADERS, stream, POST),
            frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes()),
        ]
        .concat()
    };
    let endless_headers = [
        frame(HEADERS, 0, 1, POST),
        // An unknown header, repeated.
        frame(CONTINUATION, 0, 1, b"\x00\x01x\x01y").repeat(20_000),
    ]
    .concat();
    vec![
        ("noise in place of frames", noise(64 << 10)),
        ("a frame of 16 MiB", [&[0xff; 3][..], &noise(64 << 10)].concat()),
        (
            "a window without end",
            frame(SETTINGS, 0, 0, &[0, 4, 0xff, 0xff, 0xff, 0xff]),
        ),
        (
            "a window update too far",
            frame(WINDOW_UPDATE, 0, 0, &0x7fff_ffff_u32.to_be_bytes()).repeat(2),
        ),
        ("data of no stream", frame(DATA, 0, 0, b"data")),
        ("data of a stream that is not open", frame(DATA, 0, 7, b"data")),
        (
            "settings without end",
            frame(SETTINGS, 0, 0, &[0, 3, 0, 0, 0, 9]).repeat(20_000),
        ),
        ("pings without end", frame(PING, 0, 0, b"01234567").repeat(20_000)),
        ("headers without end", endless_headers),
        (
            "headers that are not valid HPACK",
            frame(HEADERS, END_HEADERS, 1, &[0xff; 100]),
        ),
        (
            "one large header",
            frame(HEADERS, END_HEADERS, 1, &large_header()),
        ),
        (
            "calls that are reset at once",
            (0..5_000).flat_map(resets).collect(),
        ),
        (
            "a promise",
            frame(
                PUSH_PROMISE,
                END_HEADERS,
                1,
                &[&2_u32.to_be_bytes(), POST].concat(),
            ),
        ),
        ("the end of the connection", frame(GOAWAY, 0, 0, &[0; 8])),
        (
            "frames of unknown types",
            frame(0xee, 0xff, 0, b"what").repeat(1_000),
        ),
        ("a frame that is cut short", vec![0, 0, 9, SETTINGS]),
    ]
}

/// A value of 16,000 characters, which fits into a frame.
fn large_header() -> Vec<u8> {
    // 16,000 as an integer with a prefix of 7 bits.
    [&b"\x00\x01x"[..], &[0x7f, 0x81, 0x7c], &[b'y'; 16_000]].concat()
}

/// Returns bytes that are wrong from the start.
fn beginnings() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("noise", noise(64 << 10)),
        ("zeros", vec![0; 64 << 10]),
        (
            "a TLS hello",
            [&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3][..], &noise(500)].concat(),
        ),
    ]
}

/// Returns bytes of a client that are not gRPC, by name.
pub fn nonsense_of_a_client() -> Vec<(&'static str, Vec<u8>)> {
    let mut all = beginnings();
    let request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    all.push(("an HTTP/1 request", request.to_vec()));
    all.push(("half a preface", PREFACE[..10].to_vec()));
    let hello = [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat();
    all.extend(
        frames()
            .into_iter()
            .map(|(name, bytes)| (name, [&hello[..], &bytes].concat())),
    );
    all
}

/// Returns bytes of a server that are not gRPC, by name.
pub fn nonsense_of_a_server() -> Vec<(&'static str, Vec<u8>)> {
    let mut all = beginnings();
    let answer = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n";
    all.push(("an HTTP/1 answer", answer.to_vec()));
    all.push(("nothing", Vec::new()));
    let hello = frame(SETTINGS, 0, 0, &[]);
    all.extend(
        frames()
            .into_iter()
            .map(|(name, bytes)| (name, [&hello[..], &bytes].concat())),
    );
    all
}
