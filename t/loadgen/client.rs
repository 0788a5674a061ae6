//! One keep-alive connection of a client that can also go away in the middle.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// A request whose answer stops for this long has failed.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Where a client loses interest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abort {
    Never,
    MidBody,
    /// After the first bytes of the answer's body.
    MidAnswer,
}

pub struct Request<'a> {
    pub path: &'a str,
    pub body: &'a [u8],
    /// The body's length is not told in advance.
    pub chunked: bool,
    pub abort: Abort,
}

#[derive(Debug, Default)]
pub struct Answer {
    pub status: u16,
    headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// From the first byte sent to the first byte of the answer's body.
    pub first: Duration,
    pub total: Duration,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(header, _)| header.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }
}

/// Why there is no whole answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    Connect,
    /// The connection ended before a byte of the answer.
    NoAnswer,
    /// It ended within the answer.
    Cut,
    Timeout,
    Unreadable,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Failure::Connect => "cannot connect",
            Failure::NoAnswer => "no answer",
            Failure::Cut => "answer cut short",
            Failure::Timeout => "timed out",
            Failure::Unreadable => "answer cannot be read",
        })
    }
}

/// An answer that did not come whole, with what came of it.
#[derive(Debug)]
pub struct Broken {
    pub failure: Failure,
    pub answer: Answer,
}

impl From<Failure> for Broken {
    fn from(failure: Failure) -> Broken {
        Broken { failure, answer: Answer::default() }
    }
}

pub struct Client {
    address: String,
    connection: Option<TcpStream>,
    buffer: Vec<u8>,
}

impl Client {
    /// `url` is `http://host:port`.
    pub fn new(url: &str) -> Client {
        let address = url.strip_prefix("http://").unwrap_or(url).trim_end_matches('/');
        Client { address: address.to_owned(), connection: None, buffer: Vec::new() }
    }

    /// None where the client went away as it was told to. A kept connection that the server closed
    /// while it was idle is no failure: the request goes on a new one.
    pub fn send(&mut self, request: &Request<'_>) -> Result<Option<Answer>, Broken> {
        let reused = self.connection.is_some();
        match self.attempt(request) {
            Err(Broken { failure: Failure::NoAnswer, .. }) if reused => self.attempt(request),
            result => result,
        }
    }

    fn attempt(&mut self, request: &Request<'_>) -> Result<Option<Answer>, Broken> {
        let mut stream = match self.connection.take() {
            Some(stream) => stream,
            None => connect(&self.address).map_err(|_| Failure::Connect)?,
        };
        self.buffer.clear();
        let start = Instant::now();
        // An early refusal closes the way in; the answer may be there to be read all the same.
        let _ = self.write(&mut stream, request);
        if request.abort == Abort::MidBody {
            return Ok(None);
        }
        let mut answer = self.read_head(&mut stream)?;
        let keep = answer.header("connection").is_none_or(|value| value != "close");
        let stop = request.abort == Abort::MidAnswer;
        match self.read_body(&mut stream, &mut answer, start, stop) {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(failure) => return Err(Broken { failure, answer }),
        }
        answer.total = start.elapsed();
        if keep {
            self.connection = Some(stream);
        }
        Ok(Some(answer))
    }

    fn write(&self, stream: &mut TcpStream, request: &Request<'_>) -> io::Result<()> {
        let mut message = format!(
            "POST {} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n",
            request.path, self.address
        )
        .into_bytes();
        let whole = request.abort != Abort::MidBody;
        let body = if whole { request.body } else { &request.body[..request.body.len() / 2] };
        if request.chunked {
            message.extend(b"Transfer-Encoding: chunked\r\n\r\n");
            for part in body.chunks(4000) {
                message.extend(format!("{:x}\r\n", part.len()).bytes());
                message.extend(part);
                message.extend(b"\r\n");
            }
            if whole {
                message.extend(b"0\r\n\r\n");
            }
        } else {
            message.extend(format!("Content-Length: {}\r\n\r\n", request.body.len()).bytes());
            message.extend(body);
        }
        stream.write_all(&message)
    }

    fn read_head(&mut self, stream: &mut TcpStream) -> Result<Answer, Failure> {
        let end = loop {
            if let Some(end) = find(&self.buffer, b"\r\n\r\n") {
                break end;
            }
            let before = self.buffer.len();
            match self.fill(stream) {
                Ok(0) => return Err(if before == 0 { Failure::NoAnswer } else { Failure::Cut }),
                Ok(_) => {}
                Err(error) if timed_out(&error) => return Err(Failure::Timeout),
                Err(_) => return Err(if before == 0 { Failure::NoAnswer } else { Failure::Cut }),
            }
        };
        let head = String::from_utf8_lossy(&self.buffer[..end]).into_owned();
        self.buffer.drain(..end + 4);
        let mut lines = head.split("\r\n");
        let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok());
        let headers = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
            .collect();
        let status = status.ok_or(Failure::Unreadable)?;
        Ok(Answer { status, headers, ..Answer::default() })
    }

    /// False where it stopped after the first part, as asked.
    fn read_body(
        &mut self,
        stream: &mut TcpStream,
        answer: &mut Answer,
        start: Instant,
        stop: bool,
    ) -> Result<bool, Failure> {
        let chunked = answer.header("transfer-encoding").is_some_and(|value| value == "chunked");
        let length = answer.header("content-length").and_then(|value| value.parse().ok());
        if !chunked && length.is_none() {
            return Err(Failure::Unreadable);
        }
        let mut left: usize = length.unwrap_or(0);
        loop {
            if chunked {
                let line = self.line(stream)?;
                left = usize::from_str_radix(&line, 16).map_err(|_| Failure::Unreadable)?;
                if left == 0 {
                    self.line(stream)?;
                    return Ok(true);
                }
            }
            if answer.body.is_empty() {
                self.need(stream, left.min(1))?;
                answer.first = start.elapsed();
                if stop {
                    return Ok(false);
                }
            }
            self.need(stream, left)?;
            answer.body.extend(self.buffer.drain(..left));
            if !chunked {
                return Ok(true);
            }
            self.line(stream)?;
        }
    }

    fn line(&mut self, stream: &mut TcpStream) -> Result<String, Failure> {
        loop {
            if let Some(end) = find(&self.buffer, b"\r\n") {
                let line = String::from_utf8_lossy(&self.buffer[..end]).into_owned();
                self.buffer.drain(..end + 2);
                return Ok(line);
            }
            self.need(stream, self.buffer.len() + 1)?;
        }
    }

    fn need(&mut self, stream: &mut TcpStream, length: usize) -> Result<(), Failure> {
        while self.buffer.len() < length {
            match self.fill(stream) {
                Ok(1..) => {}
                Err(error) if timed_out(&error) => return Err(Failure::Timeout),
                Ok(0) | Err(_) => return Err(Failure::Cut),
            }
        }
        Ok(())
    }

    fn fill(&mut self, stream: &mut TcpStream) -> io::Result<usize> {
        let mut part = [0; 64 * 1024];
        let length = stream.read(&mut part)?;
        self.buffer.extend(&part[..length]);
        Ok(length)
    }
}

fn connect(address: &str) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    Ok(stream)
}

fn timed_out(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}
