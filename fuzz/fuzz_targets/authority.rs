//! Bytes of a peer, passed through the wrapper that makes `:authority` acceptable. The output has the length of the
//! input, does not depend on the size of the reads, and is identical outside of header blocks.
#![no_main]

use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use devlet_agent::grpc::authority::AnyAuthority;
use libfuzzer_sys::fuzz_target;
use tokio::io::{AsyncRead, ReadBuf};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A connection that returns `step` bytes per read.
struct Steps<'a> {
    rest: &'a [u8],
    step: usize,
}

impl AsyncRead for Steps<'_> {
    fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        let (now, later) = self.rest.split_at(self.step.min(buf.remaining()).min(self.rest.len()));
        buf.put_slice(now);
        self.rest = later;
        Poll::Ready(Ok(()))
    }
}

fn through(bytes: &[u8], step: usize, room: usize) -> Vec<u8> {
    let mut reader = AnyAuthority::new(Steps { rest: bytes, step });
    let mut cx = Context::from_waker(Waker::noop());
    let mut out = Vec::new();
    let mut buffer = vec![0; room];
    loop {
        let mut buf = ReadBuf::new(&mut buffer);
        match Pin::new(&mut reader).poll_read(&mut cx, &mut buf) {
            Poll::Ready(Ok(())) if buf.filled().is_empty() => return out,
            Poll::Ready(Ok(())) => out.extend_from_slice(buf.filled()),
            other => panic!("{other:?}"),
        }
    }
}

fuzz_target!(|input: &[u8]| {
    let [shape, step, rest @ ..] = input else { return };
    let mut bytes = if shape & 1 == 0 { PREFACE.to_vec() } else { Vec::new() };
    if shape & 2 == 0 {
        // A single header block, so that the fuzzer need not discover frames first.
        let length = (rest.len() as u32).to_be_bytes();
        bytes.extend([length[1], length[2], length[3], 1, 4, 0, 0, 0, 1]);
    }
    bytes.extend_from_slice(rest);

    let out = through(&bytes, usize::MAX, bytes.len() + 1);

    assert_eq!(out.len(), bytes.len());
    assert_eq!(out, through(&bytes, usize::from(*step) + 1, 64), "the output depends on the size of the reads");
    if !bytes.starts_with(PREFACE) {
        assert_eq!(out, bytes);
    }
    let again = through(&out, usize::MAX, out.len() + 1);
    assert_eq!(again, out, "acceptable input is changed");
});
