//! What was seen, as JSON and as a table.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use crate::client::{Answer, Broken};

/// One request and what became of it.
#[derive(Clone, Debug, Default)]
pub struct Record {
    pub id: usize,
    pub kind: &'static str,
    /// Why it failed; none where it did not.
    pub error: Option<String>,
    /// Seconds to the first byte of a streamed answer's body.
    pub ttft: Option<f64>,
    pub total: f64,
    /// Seconds from the start of the run to the request's end.
    pub at: f64,
    /// The same moment as seconds since 1970.
    pub ended: f64,
    pub prompt: u64,
    pub cached: Option<u64>,
    /// Who answered, and the process id of the nginx worker in between, where it tells.
    pub server: Option<String>,
    pub worker: Option<String>,
    /// `$kvc_aware_status` and `$kvc_aware_matched_tokens`, where the gateway tells them.
    pub status: Option<String>,
    pub matched: Option<u64>,
    /// The text of the answer.
    pub text: String,
}

impl Record {
    /// `expected` is the status that the request deserves.
    pub fn new(
        id: usize,
        kind: &'static str,
        expected: u16,
        result: Result<Option<Answer>, Broken>,
    ) -> Record {
        let mut record = Record { id, kind, ..Record::default() };
        match result {
            Ok(Some(answer)) => record.read(&answer, expected),
            Ok(None) => {}
            Err(broken) => {
                record.read_headers(&broken.answer);
                record.error = Some(broken.failure.to_string());
            }
        }
        record
    }

    /// Everything but the text, as a JSON object.
    pub fn line(&self) -> String {
        json!({
            "id": self.id,
            "kind": self.kind,
            "at": self.at,
            "ended": self.ended,
            "ttft": self.ttft,
            "total": self.total,
            "prompt": self.prompt,
            "cached": self.cached,
            "matched": self.matched,
            "status": self.status,
            "server": self.server,
            "worker": self.worker,
            "error": self.error,
        })
        .to_string()
    }

    fn read_headers(&mut self, answer: &Answer) {
        let address = answer.header("x-mock-engine").or(answer.header("x-upstream"));
        self.server = address.map(str::to_owned);
        self.worker = answer.header("x-worker").map(str::to_owned);
        self.status = answer.header("x-kvc-status").map(str::to_owned);
        self.matched = answer.header("x-kvc-matched-tokens").and_then(|value| value.parse().ok());
    }

    fn read(&mut self, answer: &Answer, expected: u16) {
        self.total = answer.total.as_secs_f64();
        self.read_headers(answer);
        if answer.status != expected {
            self.error = Some(format!("status {}", answer.status));
            return;
        }
        if expected != 200 {
            return;
        }
        let body = String::from_utf8_lossy(&answer.body);
        if answer.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream")) {
            self.ttft = Some(answer.first.as_secs_f64());
            if !body.trim_end().ends_with("data: [DONE]") {
                self.error = Some("stream without an end".to_owned());
            }
            for line in body.lines().filter_map(|line| line.strip_prefix("data: ")) {
                self.part(&serde_json::from_str(line).unwrap_or_default());
            }
        } else {
            match serde_json::from_str(&body) {
                Ok(value) => self.part(&value),
                Err(_) => self.error = Some("body is no JSON".to_owned()),
            }
        }
    }

    fn part(&mut self, value: &Value) {
        let choice = &value["choices"][0];
        let texts = [&choice["delta"]["content"], &choice["message"]["content"], &choice["text"]];
        if let Some(text) = texts.iter().find_map(|text| text.as_str()) {
            self.text.push_str(text);
        }
        let usage = &value["usage"];
        if let Some(tokens) = usage["prompt_tokens"].as_u64() {
            self.prompt = tokens;
            // Some versions give null for zero.
            self.cached =
                Some(usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0));
        }
    }
}

/// All of a run as JSON; times in seconds.
pub fn summary(label: &str, records: &[Record], elapsed: Duration) -> Value {
    let mut ttft: Vec<f64> = records.iter().filter_map(|record| record.ttft).collect();
    ttft.sort_by(f64::total_cmp);
    let mut servers: BTreeMap<&str, u64> = BTreeMap::new();
    let mut errors: BTreeMap<&str, u64> = BTreeMap::new();
    let mut statuses: BTreeMap<&str, u64> = BTreeMap::new();
    let mut kinds: BTreeMap<&str, u64> = BTreeMap::new();
    let count = |counts: &mut BTreeMap<_, u64>, key| *counts.entry(key).or_default() += 1;
    for record in records {
        count(&mut kinds, record.kind);
        record.server.iter().for_each(|server| *servers.entry(server).or_default() += 1);
        record.error.iter().for_each(|error| *errors.entry(error).or_default() += 1);
        record.status.iter().for_each(|status| *statuses.entry(status).or_default() += 1);
    }
    let known: Vec<_> = records.iter().filter(|record| record.cached.is_some()).collect();
    let prompt: u64 = known.iter().map(|record| record.prompt).sum();
    let cached: u64 = known.iter().filter_map(|record| record.cached).sum();
    let pairs: Vec<_> =
        records.iter().filter_map(|record| Some((record.matched?, record.cached?))).collect();
    let failed: Vec<_> = records
        .iter()
        .filter_map(|record| Some((record, record.error.as_ref()?)))
        .map(|(record, error)| {
            json!({ "id": record.id, "kind": record.kind, "error": error, "at": record.at })
        })
        .collect();
    let busiest = servers.values().max().copied().unwrap_or(0) as f64;
    let mean = servers.values().sum::<u64>() as f64 / servers.len().max(1) as f64;
    json!({
        "label": label,
        "requests": records.len(),
        "seconds": elapsed.as_secs_f64(),
        "rate": records.len() as f64 / elapsed.as_secs_f64().max(1e-9),
        "kinds": kinds,
        "errors": errors,
        "failed": failed,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "hit_rate": cached as f64 / prompt.max(1) as f64,
        "ttft": {
            "mean": ttft.iter().sum::<f64>() / ttft.len().max(1) as f64,
            "p50": quantile(&ttft, 0.5),
            "p90": quantile(&ttft, 0.9),
            "p99": quantile(&ttft, 0.99),
        },
        "servers": servers,
        "busiest_to_mean": busiest / mean.max(1e-9),
        "statuses": statuses,
        "predictions": {
            "exact": pairs.iter().filter(|(matched, cached)| matched == cached).count(),
            "over": pairs.iter().filter(|(matched, cached)| matched > cached).count(),
            "under": pairs.iter().filter(|(matched, cached)| matched < cached).count(),
        },
    })
}

/// One line for each request that failed in the second run alone: `id kind at error`.
pub fn newly_failed(before: &Value, after: &Value) -> Vec<String> {
    let failed = |run: &Value| run["failed"].as_array().cloned().unwrap_or_default();
    let known: Vec<_> = failed(before).iter().map(|entry| entry["id"].clone()).collect();
    failed(after)
        .iter()
        .filter(|entry| !known.contains(&entry["id"]))
        .map(|entry| {
            let text = |name: &str| entry[name].as_str().unwrap_or_default().to_owned();
            let at = entry["at"].as_f64().unwrap_or(0.0);
            format!("{} {} {at:.1} {}", entry["id"], text("kind"), text("error"))
        })
        .collect()
}

/// Of sorted values; 0 where there are none.
pub fn quantile(sorted: &[f64], part: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    sorted.get((last as f64 * part).round() as usize).copied().unwrap_or(0.0)
}

/// Runs side by side, one column each.
pub fn table(runs: &[Value]) -> String {
    let number = |run: &Value, path: &str| run.pointer(path).and_then(Value::as_f64).unwrap_or(0.0);
    let ms = |path: &'static str| move |run: &Value| format!("{:.0} ms", number(run, path) * 1e3);
    let pick = |path: &'static str, digits: usize| {
        move |run: &Value| format!("{:.digits$}", number(run, path))
    };
    type Cell<'a> = Box<dyn Fn(&Value) -> String + 'a>;
    let rows: [(&str, Cell<'_>); 10] = [
        ("requests", Box::new(pick("/requests", 0))),
        ("failed", Box::new(|run| run["failed"].as_array().map_or(0, Vec::len).to_string())),
        ("cache hit rate", Box::new(|run| format!("{:.1} %", number(run, "/hit_rate") * 100.0))),
        ("TTFT mean", Box::new(ms("/ttft/mean"))),
        ("TTFT p50", Box::new(ms("/ttft/p50"))),
        ("TTFT p90", Box::new(ms("/ttft/p90"))),
        ("TTFT p99", Box::new(ms("/ttft/p99"))),
        ("requests/s", Box::new(pick("/rate", 1))),
        ("seconds", Box::new(pick("/seconds", 1))),
        ("busiest/mean server", Box::new(pick("/busiest_to_mean", 2))),
    ];
    let mut text = format!("{:22}", "");
    for run in runs {
        text += &format!("{:>14}", run["label"].as_str().unwrap_or_default());
    }
    for (name, cell) in &rows {
        text += &format!("\n{name:22}");
        for run in runs {
            text += &format!("{:>14}", cell(run));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_failed_before_is_not_new() {
        let run = |ids: &[usize]| {
            let failed =
                |&id: &usize| Record { id, error: Some("x".to_owned()), ..record(1.0, 1, 0, "a") };
            summary("", &ids.iter().map(failed).collect::<Vec<_>>(), Duration::from_secs(1))
        };
        assert_eq!(newly_failed(&run(&[1, 2]), &run(&[2, 3])), ["3  0.0 x"]);
    }

    fn record(ttft: f64, prompt: u64, cached: u64, server: &str) -> Record {
        Record {
            ttft: Some(ttft),
            prompt,
            cached: Some(cached),
            server: Some(server.to_owned()),
            ..Record::default()
        }
    }

    #[test]
    fn a_summary_adds_up() {
        let mut records: Vec<_> = (1..=100)
            .map(|at| record(f64::from(at), 10, 4, if at <= 75 { "a" } else { "b" }))
            .collect();
        records[0].error = Some("status 502".to_owned());
        records[1].matched = Some(4);
        records[2].matched = Some(5);
        let run = summary("x", &records, Duration::from_secs(10));
        assert_eq!(run["hit_rate"], 0.4);
        assert_eq!(run["ttft"]["p90"], 90.0);
        assert_eq!(run["ttft"]["p99"], 99.0);
        assert_eq!(run["busiest_to_mean"], 1.5);
        assert_eq!(run["rate"], 10.0);
        let failed = json!({ "id": 0, "kind": "", "error": "status 502", "at": 0.0 });
        assert_eq!(run["failed"], json!([failed]));
        assert_eq!(run["errors"], json!({ "status 502": 1 }));
        assert_eq!(run["predictions"], json!({ "exact": 1, "over": 1, "under": 0 }));
    }
}
