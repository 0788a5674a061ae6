//! The engine's two event sockets.

use std::sync::Arc;
use std::thread;

use parking_lot::Mutex;

use super::Result;

/// Topic and payload of all that was published, by sequence number.
type Published = Arc<Mutex<Vec<(Vec<u8>, Vec<u8>)>>>;

pub struct Publisher {
    socket: zmq::Socket,
    published: Published,
}

impl Publisher {
    pub fn start(events: u16, replay: u16) -> Result<Publisher> {
        let context = zmq::Context::new();
        let bind = |kind, port| -> Result<zmq::Socket> {
            let socket = context.socket(kind)?;
            socket.set_linger(0)?;
            socket.bind(&format!("tcp://127.0.0.1:{port}"))?;
            Ok(socket)
        };
        let socket = bind(zmq::PUB, events)?;
        let router = bind(zmq::ROUTER, replay)?;
        let published = Published::default();
        let all = published.clone();
        // Ends with the process.
        thread::spawn(move || {
            while let Ok(request) = router.recv_multipart(0) {
                let _ = answer(&router, &request, &all);
            }
        });
        Ok(Publisher { socket, published })
    }

    /// Publishes a captured payload under the next number; a capture may begin in the middle of
    /// an engine's life.
    pub fn publish(&self, topic: &[u8], payload: &[u8]) -> Result<u64> {
        let mut published = self.published.lock();
        let sequence = published.len() as u64;
        published.push((topic.to_vec(), payload.to_vec()));
        drop(published);
        self.socket.send_multipart([topic, &sequence.to_be_bytes(), payload], 0)?;
        Ok(sequence)
    }
}

fn answer(router: &zmq::Socket, request: &[Vec<u8>], all: &Published) -> Result<()> {
    let [peer, _, start] = request else { return Err("a request without three frames".into()) };
    let start = u64::from_be_bytes(start.as_slice().try_into()?);
    for (sequence, (topic, payload)) in all.lock().iter().enumerate() {
        let sequence = sequence as u64;
        if sequence >= start {
            let number = sequence.to_be_bytes();
            router.send_multipart([peer, &b""[..], topic, &number, payload], 0)?;
        }
    }
    router.send_multipart([peer, &b""[..], b"", &[0xff; 8], b""], 0)?;
    Ok(())
}
