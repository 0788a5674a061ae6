//! The client body, in memory or in a file.

use std::fs::File;
use std::io;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;

use nginx_sys::{ngx_buf_t, ngx_http_request_t};

/// A body that nginx has read, with nothing of nginx in it: a job may take it to another thread.
#[derive(Default)]
pub struct Body {
    parts: Vec<Part>,
}

enum Part {
    Memory(Vec<u8>),
    /// A stretch of the temporary file that nginx wrote the body to.
    File {
        file: File,
        offset: u64,
        len: usize,
    },
}

impl Body {
    /// Takes the parts in memory and, of those in a file, where they are.
    ///
    /// # Safety
    /// nginx has read the whole body of `r`.
    pub unsafe fn collect(r: *mut ngx_http_request_t) -> io::Result<Body> {
        let mut body = Body::default();
        // SAFETY: a body that is read is a chain of buffers; those in memory hold pos..last, the
        // others file_pos..file_last of an open file.
        unsafe {
            let Some(read) = (*r).request_body.as_ref() else { return Ok(body) };
            let mut link = read.bufs;
            while let Some(entry) = link.as_ref() {
                body.add(&*entry.buf)?;
                link = entry.next;
            }
        }
        Ok(body)
    }

    unsafe fn add(&mut self, buf: &ngx_buf_t) -> io::Result<()> {
        if buf.in_file() == 1 {
            // SAFETY: the descriptor is open; the copy is ours, so that a job may read on when
            // the request is gone.
            let file = unsafe {
                let fd = libc::fcntl((*buf.file).fd, libc::F_DUPFD_CLOEXEC, 0);
                if fd < 0 {
                    return Err(io::Error::last_os_error());
                }
                File::from_raw_fd(fd)
            };
            let len = (buf.file_last - buf.file_pos) as usize;
            self.parts.push(Part::File { file, offset: buf.file_pos as u64, len });
        } else if !buf.pos.is_null() {
            // SAFETY: pos..last is what the buffer holds.
            let bytes = unsafe {
                std::slice::from_raw_parts(buf.pos, buf.last.offset_from(buf.pos) as usize)
            };
            self.parts.push(Part::Memory(bytes.to_vec()));
        }
        Ok(())
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.parts.iter().map(Part::len).sum()
    }

    /// The whole body in one piece. Reads the file, if there is one.
    pub fn read(mut self) -> io::Result<Vec<u8>> {
        if let [Part::Memory(bytes)] = &mut self.parts[..] {
            return Ok(std::mem::take(bytes));
        }
        let mut all = vec![0; self.len()];
        let mut rest = &mut all[..];
        for part in &self.parts {
            let (here, after) = rest.split_at_mut(part.len());
            match part {
                Part::Memory(bytes) => here.copy_from_slice(bytes),
                Part::File { file, offset, .. } => file.read_exact_at(here, *offset)?,
            }
            rest = after;
        }
        Ok(all)
    }
}

impl Part {
    fn len(&self) -> usize {
        match self {
            Part::Memory(bytes) => bytes.len(),
            Part::File { len, .. } => *len,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_together_in_order() {
        let path = std::env::temp_dir().join(format!("kvc-body-{}", std::process::id()));
        std::fs::write(&path, b"..file..").unwrap();
        let file = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let part = Part::File { file, offset: 2, len: 4 };
        let body =
            Body { parts: vec![Part::Memory(b"a ".to_vec()), part, Part::Memory(b"!".to_vec())] };
        assert_eq!(body.len(), 7);
        assert_eq!(body.read().unwrap(), b"a file!");
        assert_eq!(Body::default().read().unwrap(), b"");
    }
}
