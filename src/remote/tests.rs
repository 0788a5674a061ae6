//! Against engines of a few lines, on sockets of this machine.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

use super::*;

const CHAT: Api = Api { render: "/v1/chat/completions/render", tokenize: true };
const RENDER: Api = Api { tokenize: false, ..CHAT };
const NOT_FOUND: (u16, &str) = (404, r#"{"detail":"Not Found"}"#);

/// What came to a server: path, bearer, body, and the connection's number.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    path: String,
    bearer: Option<String>,
    body: String,
    connection: usize,
}

/// A server that answers each path as it is told; status 0 closes the connection, 1 never answers.
struct Engine {
    address: String,
    seen: Arc<Mutex<Vec<Seen>>>,
    answers: Arc<Mutex<HashMap<&'static str, (u16, String)>>>,
}

impl Engine {
    fn start(answers: &[(&'static str, (u16, &str))]) -> Engine {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let engine = Engine {
            address: listener.local_addr().unwrap().to_string(),
            seen: Arc::default(),
            answers: Arc::default(),
        };
        for (path, answer) in answers {
            engine.answer(path, *answer);
        }
        let (seen, answers) = (engine.seen.clone(), engine.answers.clone());
        thread::spawn(move || {
            for (number, stream) in listener.incoming().enumerate() {
                let (seen, answers) = (seen.clone(), answers.clone());
                let stream = stream.unwrap();
                thread::spawn(move || {
                    while let Some(request) = read(&stream, number) {
                        let path = request.path.clone();
                        seen.lock().push(request);
                        let (status, body) =
                            answers.lock().get(path.as_str()).cloned().unwrap_or_default();
                        match status {
                            0 => return,
                            1 => thread::park(),
                            _ => {}
                        }
                        let head =
                            format!("HTTP/1.1 {status} A\r\nContent-Length: {}\r\n", body.len());
                        (&stream).write_all(format!("{head}\r\n{body}").as_bytes()).unwrap();
                    }
                });
            }
        });
        engine
    }

    fn answer(&self, path: &'static str, (status, body): (u16, &str)) {
        self.answers.lock().insert(path, (status, body.to_owned()));
    }

    fn renders(ids: &str) -> Engine {
        Engine::start(&[(CHAT.render, (200, &format!(r#"{{"token_ids":{ids}}}"#)))])
    }

    fn paths(&self) -> Vec<String> {
        self.seen.lock().iter().map(|seen| seen.path.clone()).collect()
    }
}

fn read(stream: &TcpStream, connection: usize) -> Option<Seen> {
    let mut reader = BufReader::new(stream);
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_owned()),
        }
    }
    let header = |name: &str| {
        lines.iter().find_map(|line| {
            let (found, value) = line.split_once(": ")?;
            found.eq_ignore_ascii_case(name).then(|| value.to_owned())
        })
    };
    let mut body = vec![0; header("content-length")?.parse().ok()?];
    reader.read_exact(&mut body).ok()?;
    Some(Seen {
        path: lines[0].split(' ').nth(1)?.to_owned(),
        bearer: header("authorization"),
        body: String::from_utf8(body).ok()?,
        connection,
    })
}

fn remotes(servers: &[&Engine], key: Option<&str>) -> Remotes {
    let servers = servers.iter().map(|engine| engine.address.clone()).collect();
    Remotes::new(vec![Source { model: 3, servers, key: key.and_then(Key::read) }])
}

fn ask(remotes: &Remotes, api: Api, body: &str) -> Result<Vec<TokenId>, RemoteError> {
    remotes.ask(3, api, body.as_bytes(), None).map(|ids| ids.to_vec())
}

#[test]
fn a_request_is_rendered_as_it_came_and_kept() {
    let engine = Engine::renders("[1,2,3]");
    let remotes = remotes(&[&engine], Some("secret\n"));
    let body = r#"{"model":"m","messages":[]}"#;
    assert_eq!(remotes.cached(3, CHAT, body.as_bytes()), None);
    assert_eq!(ask(&remotes, CHAT, body), Ok(vec![1, 2, 3]));
    assert_eq!(remotes.cached(3, CHAT, body.as_bytes()).as_deref(), Some(&[1, 2, 3][..]));
    let seen = engine.seen.lock().clone();
    let expected = Seen {
        path: CHAT.render.to_owned(),
        bearer: Some("Bearer secret".to_owned()),
        body: body.to_owned(),
        connection: 0,
    };
    assert_eq!(seen, [expected]);
}

#[test]
fn a_connection_is_used_again() {
    let engine = Engine::renders("[1]");
    let remotes = remotes(&[&engine], None);
    for body in ["a", "b", "c"] {
        assert_eq!(ask(&remotes, CHAT, body), Ok(vec![1]));
    }
    let seen = engine.seen.lock().clone();
    assert_eq!(seen.iter().map(|seen| seen.connection).collect::<Vec<_>>(), [0, 0, 0]);
    assert!(seen.iter().all(|seen| seen.bearer.is_none()));
}

#[test]
fn servers_take_turns_and_one_that_failed_comes_last() {
    let (a, b) = (Engine::renders("[1]"), Engine::renders("[2]"));
    let remotes = remotes(&[&a, &b], None);
    let mut all = (0..4).map(|at| ask(&remotes, CHAT, &format!("{at}")).unwrap()[0]);
    assert_eq!([all.next(), all.next(), all.next(), all.next()], [1, 2, 1, 2].map(Some));
    a.answer(CHAT.render, (500, "{}"));
    for at in 4..8 {
        assert_eq!(ask(&remotes, CHAT, &format!("{at}")), Ok(vec![2]));
    }
    assert_eq!(a.paths().len(), 3, "asked once more, then no longer first");
    b.answer(CHAT.render, (500, "{}"));
    let (server, path) = (b.address.clone(), CHAT.render);
    a.answer(CHAT.render, (0, ""));
    b.answer(CHAT.render, (503, "{}"));
    let error = ask(&remotes, CHAT, "9").unwrap_err();
    let status = RemoteError::Status { server: server.clone(), path, status: 503 };
    let gone = matches!(&error, RemoteError::Connection { server, .. } if *server == a.address);
    assert!(gone || error == status, "{error}");
    assert_eq!(error.skip(), Skip::RemoteFailed);
}

#[test]
fn a_broken_connection_is_tried_once_more() {
    let engine = Engine::start(&[(CHAT.render, (0, ""))]);
    let error = ask(&remotes(&[&engine], None), CHAT, "a").unwrap_err();
    assert!(matches!(error, RemoteError::Connection { .. }), "{error}");
    assert_eq!(engine.paths(), [CHAT.render, CHAT.render]);
}

#[test]
fn one_that_does_not_render_is_asked_to_tokenize() {
    for (answer, remembered) in [
        (NOT_FOUND, true),
        ((403, r#"{"error":{"message":"disabled"}}"#), true),
        ((501, r#"{"error":{"message":"this model does not render"}}"#), true),
        ((404, r#"{"error":{"message":"no such model"}}"#), false),
    ] {
        let tokens = (200, r#"{"count":1,"tokens":[5]}"#);
        let engine = Engine::start(&[(CHAT.render, answer), ("/tokenize", tokens)]);
        let remotes = remotes(&[&engine], None);
        assert_eq!(ask(&remotes, CHAT, "a"), Ok(vec![5]));
        assert_eq!(ask(&remotes, CHAT, "b"), Ok(vec![5]));
        let mut expected = vec![CHAT.render, "/tokenize", CHAT.render, "/tokenize"];
        if remembered {
            expected.remove(2);
        }
        assert_eq!(engine.paths(), expected, "{answer:?}");
        let error = ask(&remotes, RENDER, "c").unwrap_err();
        assert_eq!(error, RemoteError::NoRender { server: engine.address.clone() });
        assert_eq!(error.skip(), Skip::Unsupported);
    }
}

#[test]
fn a_server_that_renders_stands_in_for_one_that_does_not() {
    let (a, b) = (Engine::start(&[(CHAT.render, NOT_FOUND)]), Engine::renders("[7]"));
    let remotes = remotes(&[&a, &b], None);
    assert_eq!(ask(&remotes, RENDER, "a"), Ok(vec![7]));
    assert_eq!((a.paths().len(), b.paths().len()), (1, 1));
}

#[test]
fn each_failure_has_its_name() {
    let engine = Engine::start(&[]);
    let (server, path) = (engine.address.clone(), CHAT.render);
    let asked = |answer: (u16, &str)| {
        engine.answer(CHAT.render, answer);
        ask(&remotes(&[&engine], None), CHAT, "a").unwrap_err()
    };
    assert_eq!(asked((400, "{}")), RemoteError::Refused);
    let features = r#"{"token_ids":[1],"features":{}}"#;
    assert_eq!(asked((200, features)), RemoteError::Multimodal);
    for status in [301, 401, 500] {
        let server = server.clone();
        assert_eq!(asked((status, "{}")), RemoteError::Status { server, path, status });
    }
    assert_eq!(asked((200, "garbage")), RemoteError::Answer { server: server.clone(), path });
    let path = "/tokenize";
    for status in [404, 500] {
        engine.answer(path, (status, "{}"));
        assert_eq!(asked(NOT_FOUND), RemoteError::Status { server: server.clone(), path, status });
    }
    engine.answer(path, (400, r#"{"error":{"message":"gpt-oss is not tokenized here"}}"#));
    assert_eq!(asked(NOT_FOUND), RemoteError::NoRender { server: server.clone() });
    engine.answer("/tokenize", (200, r#"{"tokens":[200006,17360,200008,1]}"#));
    assert_eq!(asked(NOT_FOUND), RemoteError::NoRender { server });
    assert_eq!(ask(&remotes(&[], None), CHAT, "a"), Err(RemoteError::NoServer));
    assert_eq!(remotes(&[], None).ask(4, CHAT, b"", None), Err(RemoteError::NoServer));
}

#[test]
fn no_answer_ends_with_the_deadline() {
    let engine = Engine::start(&[(CHAT.render, (1, ""))]);
    let other = Engine::renders("[1]");
    let remotes = remotes(&[&engine, &other], None);
    let deadline = Instant::now() + Duration::from_millis(50);
    let answer = remotes.ask(3, CHAT, b"a", Some(deadline));
    assert_eq!(answer, Err(RemoteError::Deadline));
    assert!(Instant::now() >= deadline);
    assert_eq!(remotes.cached(3, CHAT, b"a"), None);
    // It is asked last from now on.
    for body in ["b", "c"] {
        assert_eq!(ask(&remotes, CHAT, body), Ok(vec![1]));
    }
    assert_eq!(engine.paths().len(), 1);
    assert_eq!(remotes.ask(3, CHAT, b"d", Some(deadline)), Err(RemoteError::Deadline));
}

/// A listener to whom no connection comes through: its queue is full. The connections fill it.
/// `None` where the system refuses what a full queue does not take.
fn unreachable() -> Option<(TcpListener, Vec<TcpStream>)> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut waiting = Vec::new();
    let error = loop {
        match TcpStream::connect_timeout(&address, Duration::from_millis(200)) {
            Ok(stream) => waiting.push(stream),
            Err(error) => break error,
        }
    };
    (error.kind() == ErrorKind::TimedOut).then_some((listener, waiting))
}

#[test]
fn one_that_does_not_connect_leaves_time_for_another() {
    let Some((listener, _waiting)) = unreachable() else {
        return eprintln!("skipped: a full queue refuses connections here");
    };
    let address = listener.local_addr().unwrap().to_string();
    let other = Engine::renders("[1]");
    let servers = vec![address.clone(), other.address.clone()];
    let both = Remotes::new(vec![Source { model: 3, servers, key: None }]);
    let deadline = Instant::now() + Duration::from_secs(4);
    assert_eq!(both.ask(3, CHAT, b"a", Some(deadline)).as_deref(), Ok(&[1][..]));
    let alone = Remotes::new(vec![Source { model: 3, servers: vec![address.clone()], key: None }]);
    let deadline = Instant::now() + Duration::from_secs(1);
    let answer = alone.ask(3, CHAT, b"a", Some(deadline));
    // Some systems begin to refuse while one waits, so the cause is theirs to name.
    let Err(RemoteError::Connection { server, .. }) = answer else { panic!("{answer:?}") };
    assert_eq!(server, address);
}

#[test]
fn failures_are_logged_one_at_a_time() {
    let remotes = remotes(&[], None);
    assert!(!remotes.worth_logging(3, &RemoteError::Deadline));
    assert!(remotes.worth_logging(3, &RemoteError::NoServer));
    assert!(!remotes.worth_logging(3, &RemoteError::NoServer));
}

#[test]
fn a_key_is_one_line_and_is_not_shown() {
    let key = Key::read(" sk-1\n").unwrap();
    assert_eq!(key, Key("sk-1".to_owned()));
    assert_eq!(format!("{key:?}"), "Key(..)");
    for text in ["", " \n", "a b", "a\nb", "é"] {
        assert_eq!(Key::read(text), None, "{text:?}");
    }
}
