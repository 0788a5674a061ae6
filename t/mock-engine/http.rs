//! HTTP/1.1 with keep-alive, bodies of a known length or chunked, and streamed answers.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

const MAX_HEAD: usize = 64 * 1024;
const MAX_BODY: usize = 256 * 1024 * 1024;

/// A peer that stops in the middle of a request is dropped after this.
const STALLED: Duration = Duration::from_secs(60);

#[derive(Clone, Debug, Default)]
pub struct Request {
    pub method: String,
    pub path: String,
    /// Without the question mark.
    pub query: String,
    /// As received, in order.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(header, _)| header.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }
}

pub struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
    /// Whether the client lets the connection live after this request.
    keep_alive: bool,
    /// Sent with every answer.
    pub headers: Vec<(&'static str, String)>,
}

impl Connection {
    pub fn new(stream: TcpStream) -> io::Result<Connection> {
        stream.set_nodelay(true)?;
        Ok(Connection { stream, buffer: Vec::new(), keep_alive: true, headers: Vec::new() })
    }

    /// The next request; None where the client is done, or stayed idle for too long.
    pub fn next(&mut self, idle: Duration) -> io::Result<Option<Request>> {
        if !self.keep_alive {
            return Ok(None);
        }
        self.stream.set_read_timeout(Some(idle.max(Duration::from_millis(1))))?;
        let mut request = loop {
            if let Some(end) = find(&self.buffer, b"\r\n\r\n") {
                let head = String::from_utf8_lossy(&self.buffer[..end]).into_owned();
                self.buffer.drain(..end + 4);
                break parse_head(&head)?;
            }
            if self.buffer.len() > MAX_HEAD {
                return Err(invalid("a request head of that size"));
            }
            match self.fill() {
                Ok(0) => return Ok(None),
                Ok(_) => self.stream.set_read_timeout(Some(STALLED))?,
                Err(_) if self.buffer.is_empty() => return Ok(None),
                Err(error) => return Err(error),
            }
        };
        let close =
            request.header("connection").is_some_and(|value| value.eq_ignore_ascii_case("close"));
        self.keep_alive = !close;
        if request.header("expect").is_some() {
            self.stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        }
        request.body = self.body(&request)?;
        Ok(Some(request))
    }

    /// Whether the client has closed its side while it waits for an answer.
    pub fn gone(&self) -> bool {
        let peek = || {
            self.stream.set_nonblocking(true)?;
            let seen = self.stream.peek(&mut [0]);
            self.stream.set_nonblocking(false)?;
            seen
        };
        match peek() {
            Ok(0) => true,
            Ok(_) => false,
            Err(error) => error.kind() != io::ErrorKind::WouldBlock,
        }
    }

    pub fn respond(&mut self, status: u16, kind: &str, body: &[u8]) -> io::Result<()> {
        let mut message = self.head(status, kind);
        message.extend(format!("Content-Length: {}\r\n\r\n", body.len()).bytes());
        message.extend(body);
        self.stream.write_all(&message)
    }

    /// The head of an answer whose parts come by [`Connection::part`].
    pub fn start(&mut self, status: u16, kind: &str) -> io::Result<()> {
        let mut message = self.head(status, kind);
        message.extend(b"Transfer-Encoding: chunked\r\n\r\n");
        self.stream.write_all(&message)
    }

    pub fn part(&mut self, data: &str) -> io::Result<()> {
        self.stream.write_all(format!("{:x}\r\n{data}\r\n", data.len()).as_bytes())
    }

    pub fn finish(&mut self) -> io::Result<()> {
        self.stream.write_all(b"0\r\n\r\n")
    }

    fn head(&self, status: u16, kind: &str) -> Vec<u8> {
        let reason = match status {
            200 => "OK",
            400 => "Bad Request",
            404 => "Not Found",
            _ => "Answer",
        };
        let mut head = format!("HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\n");
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if !self.keep_alive {
            head.push_str("Connection: close\r\n");
        }
        head.into_bytes()
    }

    fn body(&mut self, request: &Request) -> io::Result<Vec<u8>> {
        let coding = request.header("transfer-encoding");
        if coding.is_some_and(|value| value.eq_ignore_ascii_case("chunked")) {
            return self.chunked();
        }
        let length = match request.header("content-length") {
            Some(length) => length.trim().parse().map_err(|_| invalid("the content length"))?,
            None => 0,
        };
        self.take(length)
    }

    fn chunked(&mut self) -> io::Result<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let line = self.line()?;
            let size = line.split(';').next().unwrap_or_default().trim();
            let size = usize::from_str_radix(size, 16).map_err(|_| invalid("a chunk's size"))?;
            if size == 0 {
                while !self.line()?.is_empty() {}
                return Ok(body);
            }
            body.extend(self.take(size)?);
            if body.len() > MAX_BODY || !self.line()?.is_empty() {
                return Err(invalid("a chunk's end"));
            }
        }
    }

    fn line(&mut self) -> io::Result<String> {
        loop {
            if let Some(end) = find(&self.buffer, b"\r\n") {
                let line = String::from_utf8_lossy(&self.buffer[..end]).into_owned();
                self.buffer.drain(..end + 2);
                return Ok(line);
            }
            if self.fill()? == 0 || self.buffer.len() > MAX_BODY {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    fn take(&mut self, length: usize) -> io::Result<Vec<u8>> {
        if length > MAX_BODY {
            return Err(invalid("a body of that size"));
        }
        while self.buffer.len() < length {
            if self.fill()? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        let rest = self.buffer.split_off(length);
        Ok(std::mem::replace(&mut self.buffer, rest))
    }

    fn fill(&mut self) -> io::Result<usize> {
        let mut chunk = [0; 64 * 1024];
        let length = self.stream.read(&mut chunk)?;
        self.buffer.extend(&chunk[..length]);
        Ok(length)
    }
}

fn parse_head(head: &str) -> io::Result<Request> {
    let mut lines = head.split("\r\n");
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (Some(method), Some(target)) = (words.next(), words.next()) else {
        return Err(invalid("the request line"));
    };
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let headers = lines
        .map(|line| line.split_once(':').ok_or_else(|| invalid("a header line")))
        .map(|pair| pair.map(|(name, value)| (name.to_owned(), value.trim().to_owned())))
        .collect::<io::Result<_>>()?;
    Ok(Request {
        method: method.to_owned(),
        path: path.to_owned(),
        query: query.to_owned(),
        headers,
        body: Vec::new(),
    })
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("cannot read {what}"))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// What a connection reads from a client that sends `bytes` and closes.
    fn requests(bytes: &[u8]) -> (Vec<Request>, io::Result<Option<Request>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.write_all(bytes).unwrap();
        drop(client);
        let mut connection = Connection::new(listener.accept().unwrap().0).unwrap();
        let mut seen = Vec::new();
        loop {
            match connection.next(STALLED) {
                Ok(Some(request)) => seen.push(request),
                end => return (seen, end),
            }
        }
    }

    #[test]
    fn pipelined_requests_keep_their_bodies_apart() {
        let (seen, end) = requests(
            b"POST /a?x=1&y HTTP/1.1\r\nContent-Length: 3\r\nX-Name:  v \r\n\r\nabc\
              POST /b HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n\
              4;ext\r\n\r\nde\r\n2\r\nfg\r\n0\r\nTrailer: x\r\n\r\n\
              GET /c HTTP/1.1\r\n\r\n",
        );
        assert!(matches!(end, Ok(None)));
        let bodies: Vec<_> = seen.iter().map(|request| request.body.as_slice()).collect();
        assert_eq!(bodies, [&b"abc"[..], b"\r\ndefg", b""]);
        assert_eq!((seen[0].path.as_str(), seen[0].header("x-name")), ("/a", Some("v")));
        assert_eq!(seen[0].query, "x=1&y");
    }

    #[test]
    fn a_body_cut_short_is_an_error() {
        for head in ["Content-Length: 5", "Transfer-Encoding: chunked"] {
            let text = format!("POST / HTTP/1.1\r\n{head}\r\n\r\n3\r\n");
            let (seen, end) = requests(text.as_bytes());
            assert!(seen.is_empty() && end.is_err(), "{head}: {seen:?}");
        }
    }
}
