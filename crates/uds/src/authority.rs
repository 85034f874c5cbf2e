//! Lets `h2` accept the `:authority` that Go clients send.
//!
//! A grpc-go client that dials a bare socket path sends that path as `:authority`, raw (`/var/lib/…`) or
//! percent-encoded (`%2Fvar%2Flib…`). `h2` resets such a stream with `PROTOCOL_ERROR`. [`AuthorityRewriter`] sits
//! between the accepted socket and `h2` and replaces the offending characters in that one header value:
//!
//! ```text
//!   socket ──► preface ──► frames ──┬─ HEADERS + CONTINUATION: held until complete, value replaced ──► h2
//!                                   └─ all others: passed on where they lie ───────────────────────►
//! ```
//!
//! A replacement is as long as what it replaces, in bytes (raw literals) or in bits (Huffman-coded ones), so
//! that no length changes and the peer's and our header tables stay in step: the entry has the same size, and
//! a later reference to it finds the replaced value.
//!
//! Invariants, checked by the tests below and the fuzz target `authority`:
//! - as many bytes come out as went in, and only values of `:authority` differ;
//! - a value either becomes acceptable or stays as it was, and then `h2` refuses it;
//! - how the bytes are split over reads and frames changes nothing;
//! - at most [`HELD_LIMIT`] bytes and the index of their frames are held: a longer header block passes unchanged;
//! - after bytes that are not HTTP/2, everything passes unchanged.
//!
//! Deliberately absent: the dynamic table. An encoder that names `:authority` by anything but the static index
//! or the literal name is not helped; none is known.

use std::io::{self, IoSlice};
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http::uri;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::huffman;

/// The longest header block, with the heads of its frames, whose `:authority` is replaced.
pub const HELD_LIMIT: usize = 64 * 1024;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const FRAME_HEAD: usize = 9;
const HEADERS: u8 = 0x1;
const CONTINUATION: u8 = 0x9;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// The name `:authority`, Huffman-coded.
const AUTHORITY_CODED: &[u8] = &[0xb8, 0x3b, 0x53, 0x39, 0xec, 0x32, 0x7d, 0x7f];

/// Bytes of one read while a header block is incomplete.
const HELD_STEP: usize = 4096;

/// The server's side of an HTTP/2 connection on which every `:authority` is acceptable to `h2`.
#[derive(Debug)]
pub struct AuthorityRewriter<T> {
    inner: T,
    scanner: Scanner,
    /// Bytes read but not passed on yet.
    held: Vec<u8>,
    /// Number of held bytes that may be passed on.
    ready: usize,
}

impl<T> AuthorityRewriter<T> {
    /// Wraps a connection of which nothing has been read yet.
    pub fn new(inner: T) -> Self {
        Self {
            inner,
            scanner: Scanner::default(),
            held: Vec::new(),
            ready: 0,
        }
    }

    /// Returns the connection itself.
    pub fn inner(&self) -> &T {
        &self.inner
    }

    fn pass_on(&mut self, buf: &mut ReadBuf<'_>) {
        let count = self.ready.min(buf.remaining());
        buf.put_slice(&self.held[..count]);
        self.ready -= count;
        if count == self.held.len() {
            self.held = Vec::new();
        } else {
            self.held.drain(..count);
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for AuthorityRewriter<T> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        loop {
            if this.ready > 0 {
                this.pass_on(buf);
                return Poll::Ready(Ok(()));
            }
            if this.held.is_empty() {
                let before = buf.filled().len();
                ready!(Pin::new(&mut this.inner).poll_read(cx, buf))?;
                let fresh = &mut buf.filled_mut()[before..];
                if fresh.is_empty() {
                    return Poll::Ready(Ok(()));
                }
                let done = this.scanner.scan(fresh);
                this.held.extend_from_slice(&fresh[done..]);
                buf.set_filled(before + done);
                if done > 0 {
                    return Poll::Ready(Ok(()));
                }
            } else {
                let mut step = [0; HELD_STEP];
                let mut more = ReadBuf::new(&mut step);
                ready!(Pin::new(&mut this.inner).poll_read(cx, &mut more))?;
                if more.filled().is_empty() {
                    // The peer left in the middle of a header block.
                    this.scanner.stop();
                }
                this.held.extend_from_slice(more.filled());
                this.ready = this.scanner.scan(&mut this.held);
            }
        }
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for AuthorityRewriter<T> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

/// Error: bytes that RFC 9113 or RFC 7541 does not allow.
#[derive(Debug)]
struct Malformed;

/// Position of the next byte in the connection.
#[derive(Debug)]
struct Scanner {
    phase: Phase,
    /// Number of bytes of the current frame that pass unchanged.
    skip: usize,
    /// The header block that starts with the next byte, as far as it has been seen.
    block: Block,
}

#[derive(Debug)]
enum Phase {
    /// This much of the preface has been seen.
    Preface(usize),
    Frames,
    /// Everything passes unchanged.
    Stopped,
}

/// Offsets are relative to the first frame of the block.
#[derive(Debug, Default)]
struct Block {
    stream: u32,
    fragments: Vec<Range<usize>>,
    /// The end of the last complete frame.
    seen: usize,
}

enum Step {
    /// Neither a whole frame head nor a whole header block yet.
    NeedMore,
    /// This many bytes pass as they are.
    Skip(usize),
    /// A header block, and how many bytes its frames have.
    Complete(Block, usize),
}

impl Default for Scanner {
    fn default() -> Self {
        Self {
            phase: Phase::Preface(0),
            skip: 0,
            block: Block::default(),
        }
    }
}

impl Scanner {
    fn stop(&mut self) {
        self.phase = Phase::Stopped;
        self.block = Block::default();
    }

    /// Rewrites complete header blocks in `bytes`, and returns the number of bytes that may be passed on.
    ///
    /// The next call starts with the bytes after them.
    fn scan(&mut self, bytes: &mut [u8]) -> usize {
        let mut at = 0;
        while at < bytes.len() {
            match self.phase {
                Phase::Stopped => return bytes.len(),
                Phase::Preface(seen) => {
                    let count = (PREFACE.len() - seen).min(bytes.len() - at);
                    if bytes[at..at + count] != PREFACE[seen..seen + count] {
                        self.stop();
                        continue;
                    }
                    at += count;
                    self.phase = if seen + count == PREFACE.len() {
                        Phase::Frames
                    } else {
                        Phase::Preface(seen + count)
                    };
                }
                Phase::Frames if self.skip > 0 => {
                    let count = self.skip.min(bytes.len() - at);
                    at += count;
                    self.skip -= count;
                }
                Phase::Frames => {
                    let rest = &mut bytes[at..];
                    match self.step(rest) {
                        Ok(Step::NeedMore) => return at,
                        Ok(Step::Skip(count)) => self.skip = count,
                        Ok(Step::Complete(block, length)) => {
                            at += length;
                            if replace_in_frames(rest, &block.fragments).is_err() {
                                self.stop();
                            }
                        }
                        Err(Malformed) => self.stop(),
                    }
                }
            }
        }
        at
    }

    fn step(&mut self, bytes: &[u8]) -> Result<Step, Malformed> {
        loop {
            let start = self.block.seen;
            let Some(head) = bytes
                .get(start..)
                .and_then(|rest| rest.first_chunk::<FRAME_HEAD>())
            else {
                return Ok(Step::NeedMore);
            };
            let [l2, l1, l0, kind, flags, s3, s2, s1, s0] = *head;
            let end = start + FRAME_HEAD + u32::from_be_bytes([0, l2, l1, l0]) as usize;
            let stream = u32::from_be_bytes([s3 & 0x7f, s2, s1, s0]);
            let is_first = start == 0;
            if is_first && kind != HEADERS {
                return Ok(Step::Skip(end));
            }
            if !is_first && (kind != CONTINUATION || stream != self.block.stream) {
                return Err(Malformed);
            }
            if end > HELD_LIMIT {
                // The CONTINUATION frames that follow do not start a block, so they are skipped as well.
                self.block = Block::default();
                return Ok(Step::Skip(end));
            }
            let Some(body) = bytes.get(start + FRAME_HEAD..end) else {
                return Ok(Step::NeedMore);
            };
            let fragment = if is_first {
                fragment(body, flags)?
            } else {
                0..body.len()
            };
            self.block.stream = stream;
            self.block.seen = end;
            let offset = start + FRAME_HEAD;
            self.block
                .fragments
                .push(offset + fragment.start..offset + fragment.end);
            if flags & END_HEADERS != 0 {
                return Ok(Step::Complete(std::mem::take(&mut self.block), end));
            }
        }
    }
}

/// Returns the range of the header block fragment in the body of a HEADERS frame.
fn fragment(body: &[u8], flags: u8) -> Result<Range<usize>, Malformed> {
    let mut start = 0;
    let mut end = body.len();
    if flags & PADDED != 0 {
        let padding = usize::from(*body.first().ok_or(Malformed)?);
        start += 1;
        end = end.checked_sub(padding).ok_or(Malformed)?;
    }
    if flags & PRIORITY != 0 {
        start += 5;
    }
    if start > end {
        return Err(Malformed);
    }
    Ok(start..end)
}

fn replace_in_frames(bytes: &mut [u8], fragments: &[Range<usize>]) -> Result<(), Malformed> {
    if let [only] = fragments {
        return replace_in_block(&mut bytes[only.clone()]);
    }
    let mut block: Vec<u8> = fragments
        .iter()
        .flat_map(|range| &bytes[range.clone()])
        .copied()
        .collect();
    replace_in_block(&mut block)?;
    let mut rest = &block[..];
    for range in fragments {
        let (fragment, after) = rest.split_at(range.len());
        bytes[range.clone()].copy_from_slice(fragment);
        rest = after;
    }
    Ok(())
}

/// Replaces the values of `:authority` in a whole header block (RFC 7541 section 6).
fn replace_in_block(block: &mut [u8]) -> Result<(), Malformed> {
    let mut at = 0;
    while let Some(&first) = block.get(at) {
        let prefix = match first {
            0x80.. => {
                integer(block, &mut at, 7)?;
                continue;
            }
            0x40.. => 6,
            0x20.. => {
                integer(block, &mut at, 5)?;
                continue;
            }
            _ => 4,
        };
        let is_authority = match integer(block, &mut at, prefix)? {
            0 => {
                let name = string(block, &mut at)?;
                let bytes = &block[name.range];
                if name.is_coded {
                    bytes == AUTHORITY_CODED
                } else {
                    bytes == b":authority"
                }
            }
            index => index == 1,
        };
        let value = string(block, &mut at)?;
        if is_authority {
            replace_in_value(&mut block[value.range], value.is_coded)?;
        }
    }
    Ok(())
}

/// Reads an integer with a prefix of `prefix` bits (RFC 7541 section 5.1).
fn integer(block: &[u8], at: &mut usize, prefix: u32) -> Result<usize, Malformed> {
    let mut next = || -> Result<usize, Malformed> {
        let byte = *block.get(*at).ok_or(Malformed)?;
        *at += 1;
        Ok(usize::from(byte))
    };
    let most = (1 << prefix) - 1;
    let mut value = next()? & most;
    if value < most {
        return Ok(value);
    }
    // Four more bytes are more than any length or index here can need.
    for shift in [0, 7, 14, 21] {
        let byte = next()?;
        value += (byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(Malformed)
}

struct Literal {
    is_coded: bool,
    range: Range<usize>,
}

/// A string literal (RFC 7541 section 5.2).
fn string(block: &[u8], at: &mut usize) -> Result<Literal, Malformed> {
    let is_coded = block.get(*at).ok_or(Malformed)? & 0x80 != 0;
    let length = integer(block, at, 7)?;
    let range = *at..at
        .checked_add(length)
        .filter(|&end| end <= block.len())
        .ok_or(Malformed)?;
    *at = range.end;
    Ok(Literal { is_coded, range })
}

fn replace_in_value(value: &mut [u8], is_coded: bool) -> Result<(), Malformed> {
    if is_coded {
        let text = huffman::decode(value).ok_or(Malformed)?;
        let coded = acceptable(&text, same_length).map(|text| huffman::encode(&text));
        if let Some(coded) = coded.filter(|coded| coded.len() == value.len()) {
            value.copy_from_slice(&coded);
        }
    } else if let Some(text) = acceptable(value, |_| Some(b'.')) {
        value.copy_from_slice(&text);
    }
    Ok(())
}

/// Returns the value with characters replaced so that `h2` accepts it; `None` if `h2` accepts it anyway, or cannot.
fn acceptable(value: &[u8], replacement: impl Fn(u8) -> Option<u8>) -> Option<Vec<u8>> {
    let is_accepted = |value: &[u8]| uri::Authority::try_from(value).is_ok();
    if value.is_empty() || is_accepted(value) {
        return None;
    }
    // These have a meaning, and are wrong only in the wrong place.
    let may_stay = |byte: u8| is_plain(byte) || b":@[]".contains(&byte);
    [&may_stay as &dyn Fn(u8) -> bool, &is_plain]
        .into_iter()
        .find_map(|stays| {
            let text: Option<Vec<u8>> = value
                .iter()
                .map(|&byte| {
                    if stays(byte) {
                        Some(byte)
                    } else {
                        replacement(byte)
                    }
                })
                .collect();
            text.filter(|text| is_accepted(text))
        })
}

/// Returns `true` if `byte` is allowed anywhere in an authority: unreserved or a sub-delimiter (RFC 3986 section 2).
fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=".contains(&byte)
}

/// Returns a plain character whose Huffman code is as long as that of `byte`, if there is one.
fn same_length(byte: u8) -> Option<u8> {
    match huffman::length(byte) {
        6 => Some(b'.'),
        7 => Some(b'x'),
        8 => Some(b'*'),
        10 => Some(b'!'),
        11 => Some(b'+'),
        13 => Some(b'~'),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
