//! Which failures are the work of faults that would hit any proxy: a killed worker loses the
//! connections in its hands, and an engine that ends cuts off its answers.
//!
//! A list of faults has one `time worker PID` or `time engine HOST:PORT` a line, in seconds since
//! 1970, written just before the fault.

use serde_json::Value;

/// Seconds between a fault and the end of what it broke, on a busy machine.
const LATE: f64 = 1.0;
/// Clocks of the list and of the records differ by what it takes to start a process.
const EARLY: f64 = 0.1;

#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    at: f64,
    culprit: Culprit,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Culprit {
    /// The process id.
    Worker(String),
    /// The address.
    Engine(String),
}

#[derive(Debug, Default)]
pub struct Tally {
    pub requests: usize,
    pub by_worker: usize,
    pub by_engine: usize,
    /// Records, a line each.
    pub unexplained: Vec<String>,
}

pub fn faults(list: &str) -> Result<Vec<Fault>, String> {
    list.lines()
        .map(|line| {
            let bad = || format!("\"{line}\" is no fault");
            let mut words = line.split_whitespace();
            let mut next = || words.next().ok_or_else(bad);
            let at = next()?.parse().map_err(|_| bad())?;
            let culprit = match (next()?, next()?.to_owned()) {
                ("worker", pid) => Culprit::Worker(pid),
                ("engine", address) => Culprit::Engine(address),
                _ => return Err(bad()),
            };
            Ok(Fault { at, culprit })
        })
        .collect()
}

impl Tally {
    /// Adds the records of a file, a JSON object a line.
    pub fn add(&mut self, faults: &[Fault], records: &str) -> Result<(), String> {
        for line in records.lines() {
            let record: Value = serde_json::from_str(line).map_err(|error| error.to_string())?;
            self.requests += 1;
            if record["error"].is_null() {
                continue;
            }
            match faults.iter().find(|fault| fault.explains(&record)).map(|fault| &fault.culprit) {
                Some(Culprit::Worker(_)) => self.by_worker += 1,
                Some(Culprit::Engine(_)) => self.by_engine += 1,
                None => self.unexplained.push(line.to_owned()),
            }
        }
        Ok(())
    }

    pub fn line(&self) -> String {
        let Tally { requests, by_worker, by_engine, unexplained } = self;
        format!(
            "requests {requests} worker {by_worker} engine {by_engine} other {}",
            unexplained.len()
        )
    }
}

impl Fault {
    fn explains(&self, record: &Value) -> bool {
        let text = |name: &str| record[name].as_str();
        let ended = record["ended"].as_f64().unwrap_or(f64::INFINITY);
        if !(ended - LATE..ended + EARLY).contains(&self.at) {
            return false;
        }
        let error = text("error").unwrap_or_default();
        match &self.culprit {
            // Before the answer's head nobody says whose connection it was.
            Culprit::Worker(pid) => match text("worker") {
                Some(worker) => error == "answer cut short" && worker == pid,
                None => matches!(error, "no answer" | "answer cut short"),
            },
            Culprit::Engine(address) => {
                matches!(error, "answer cut short" | "stream without an end")
                    && text("server") == Some(address)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn blamed(error: &str, ended: f64, worker: Option<&str>, server: Option<&str>) -> String {
        let faults = faults("10.0 worker 7\n20.0 engine a:1\n").unwrap();
        let record = json!({ "error": error, "ended": ended, "worker": worker, "server": server });
        let mut tally = Tally::default();
        tally.add(&faults, &format!("{record}\n{{\"error\": null}}\n")).unwrap();
        tally.line()
    }

    #[test]
    fn a_fault_explains_what_it_can_have_broken() {
        const WORKER: &str = "requests 2 worker 1 engine 0 other 0";
        const ENGINE: &str = "requests 2 worker 0 engine 1 other 0";
        const NOBODY: &str = "requests 2 worker 0 engine 0 other 1";
        let cut = "answer cut short";
        assert_eq!(blamed(cut, 10.2, Some("7"), Some("a:1")), WORKER);
        assert_eq!(blamed("no answer", 10.2, None, None), WORKER);
        assert_eq!(blamed("stream without an end", 20.5, Some("8"), Some("a:1")), ENGINE);
        assert_eq!(blamed(cut, 10.2, Some("8"), Some("a:1")), NOBODY, "another worker");
        assert_eq!(blamed(cut, 20.2, Some("8"), Some("b:1")), NOBODY, "another engine");
        assert_eq!(blamed(cut, 9.5, Some("7"), None), NOBODY, "before it");
        assert_eq!(blamed("no answer", 12.0, None, None), NOBODY, "long after");
        assert_eq!(blamed("status 502", 10.2, None, None), NOBODY, "an answer of nginx");
        assert_eq!(blamed("no answer", 20.2, None, None), NOBODY, "an engine behind nginx");
    }

    #[test]
    fn a_list_that_cannot_be_read_is_refused() {
        for list in ["x", "1.0 worker", "1.0 cook 7", "now worker 7"] {
            assert_eq!(faults(list), Err(format!("\"{list}\" is no fault")));
        }
    }
}
