//! What each path answers.

use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use serde::Serialize;
use tokio::time::timeout;

use super::api::Refusal;
use super::drain::drain;
use super::{State, api, metrics, status};
use crate::fs::InodeOrder;
use crate::fuse::throttle::Rates;
use crate::limits::{CONTROL_BODY, CONTROL_PATIENCE, CONTROL_TOP};

type Answer = Response<Full<Bytes>>;

/// Default of `top`.
const TOP: usize = 20;

/// The longest time that a client may ask POST /drain for.
const LONGEST: Duration = Duration::from_secs(300);

/// Default of the drain's `timeout`.
const DRAIN: Duration = Duration::from_secs(10);

const PATHS: &str = "/metrics, /status, /inodes, /mappings, /limits, /log, /drain, /resume";

/// Answers a request.
pub async fn answer(state: &Arc<State>, request: Request<Incoming>) -> Answer {
    let allowed = match request.uri().path() {
        "/metrics" | "/status" | "/inodes" | "/mappings" => "GET, HEAD",
        "/limits" | "/log" => "GET, HEAD, PUT",
        "/drain" | "/resume" => "POST",
        path => {
            let text = format!("there is no {:?}: the paths are {PATHS}", path.chars().take(64).collect::<String>());
            return refuse((StatusCode::NOT_FOUND, text));
        }
    };
    if !allowed.split(", ").any(|method| method == request.method().as_str()) {
        let text = format!("{} takes {allowed}", request.uri().path());
        let mut answer = refuse((StatusCode::METHOD_NOT_ALLOWED, text));
        answer.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
        return answer;
    }
    serve(state, request).await.unwrap_or_else(refuse)
}

async fn serve(state: &Arc<State>, request: Request<Incoming>) -> Result<Answer, Refusal> {
    let query = Query::of(request.uri().query())?;
    let path = request.uri().path().to_owned();
    query.check(match &*path {
        "/inodes" => &["top", "by"],
        "/drain" => &["timeout", "hold"],
        _ => &[],
    })?;
    let sources = &state.sources;
    match &*path {
        "/metrics" => Ok(text(metrics::encode(state), metrics::CONTENT_TYPE)),
        "/status" => json(&status::status(state)),
        "/inodes" => {
            let top = query.number("top")?.unwrap_or(TOP as f64);
            if !(1.0..=CONTROL_TOP as f64).contains(&top) || top.fract() != 0.0 {
                return Err(bad(format!("top is 1 to {CONTROL_TOP}")));
            }
            let order = match query.get("by") {
                None | Some("nlookup") => InodeOrder::Lookups,
                Some("opens") => InodeOrder::Opens,
                Some(_) => return Err(bad("by is 'nlookup' or 'opens'".into())),
            };
            json(&status::inodes(state, top as usize, order).await?)
        }
        "/mappings" => json(&status::mappings(sources).await?),
        "/limits" => {
            let throttle = sources.server.throttle();
            if request.method() == Method::PUT {
                let limits: api::Limits = serde_json::from_slice(&body(request).await?)
                    .map_err(|e| bad(format!("the body is {{\"iops\":\"LIMITS\",\"bandwidth\":\"LIMITS\"}}: {e}")))?;
                let rates = |name: &str, rates: Result<Rates, String>| rates.map_err(|e| bad(format!("{name}: {e}")));
                let iops = rates("iops", Rates::iops(&limits.iops))?;
                let bandwidth = rates("bandwidth", Rates::bandwidth(&limits.bandwidth))?;
                throttle.set(iops, bandwidth);
                tracing::info!(
                    "the control socket has set the limits to {:?} iops, {:?} bandwidth",
                    limits.iops,
                    limits.bandwidth
                );
            }
            let [iops, bandwidth] = throttle.rates().map(|rates| rates.to_string());
            json(&api::Limits { iops, bandwidth })
        }
        "/log" if request.method() == Method::PUT => {
            let filter = body(request).await?;
            let filter = std::str::from_utf8(&filter).map_err(|_| bad("the filter is not UTF-8".into()))?.trim();
            let filter = (sources.log)(Some(filter)).map_err(bad)?;
            tracing::info!("the control socket has set the log's filter to {filter:?}");
            json(&api::Log { filter })
        }
        "/log" => json(&api::Log { filter: (sources.log)(None).map_err(bad)? }),
        "/drain" => {
            let seconds = |name, default| match query.number(name)? {
                None => Ok(default),
                Some(seconds) if (0.0..=LONGEST.as_secs_f64()).contains(&seconds) => {
                    Ok(Duration::from_secs_f64(seconds))
                }
                Some(_) => Err(bad(format!("{name} is 0 to {} seconds", LONGEST.as_secs()))),
            };
            json(&drain(state, seconds("timeout", DRAIN)?, seconds("hold", Duration::ZERO)?).await?)
        }
        _ => json(&api::Resumed { was_held: state.drain.resume() }),
    }
}

/// The parameters after the question mark. None of them needs an escape.
struct Query<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Query<'a> {
    fn of(query: Option<&'a str>) -> Result<Self, Refusal> {
        let parts = query.into_iter().flat_map(|query| query.split('&')).filter(|part| !part.is_empty());
        let pairs = parts.map(|part| part.split_once('=').ok_or_else(|| bad("a parameter is NAME=VALUE".into())));
        pairs.collect::<Result<_, _>>().map(Self)
    }

    fn check(&self, known: &[&str]) -> Result<(), Refusal> {
        match self.0.iter().all(|(name, _)| known.contains(name)) {
            true => Ok(()),
            false if known.is_empty() => Err(bad("this path has no parameters".into())),
            false => Err(bad(format!("the parameters are {}", known.join(" and ")))),
        }
    }

    fn get(&self, name: &str) -> Option<&'a str> {
        self.0.iter().rev().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }

    fn number(&self, name: &str) -> Result<Option<f64>, Refusal> {
        let number = |text: &str| text.parse().map_err(|_| bad(format!("{name} is a number")));
        self.get(name).map(number).transpose()
    }
}

async fn body(request: Request<Incoming>) -> Result<Bytes, Refusal> {
    let body = Limited::new(request.into_body(), CONTROL_BODY).collect();
    match timeout(CONTROL_PATIENCE, body).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(e)) if e.is::<LengthLimitError>() => {
            Err((StatusCode::PAYLOAD_TOO_LARGE, format!("a body has at most {CONTROL_BODY} bytes")))
        }
        Ok(Err(e)) => Err(bad(format!("the body did not come: {e}"))),
        Err(_) => Err((StatusCode::REQUEST_TIMEOUT, "the body did not come in time".into())),
    }
}

fn bad(text: String) -> Refusal {
    (StatusCode::BAD_REQUEST, text)
}

fn json(value: &impl Serialize) -> Result<Answer, Refusal> {
    let text_of = |e: serde_json::Error| (StatusCode::INTERNAL_SERVER_ERROR, e.to_string());
    Ok(text(serde_json::to_string(value).map_err(text_of)? + "\n", "application/json"))
}

fn text(text: String, kind: &'static str) -> Answer {
    let mut answer = Response::new(Full::new(text.into()));
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}

fn refuse((code, error): Refusal) -> Answer {
    let mut answer = json(&api::Error { error }).unwrap_or_default();
    *answer.status_mut() = code;
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters() {
        let query = Query::of(Some("top=5&by=opens&top=7")).map_err(|e| e.1).unwrap();
        assert_eq!((query.get("top"), query.get("by"), query.get("hold")), (Some("7"), Some("opens"), None));
        assert!(query.check(&["top", "by"]).is_ok() && query.check(&["top"]).is_err() && query.check(&[]).is_err());
        assert_eq!(query.number("top"), Ok(Some(7.0)));
        assert!(query.number("by").is_err());
        assert!(Query::of(Some("top")).is_err() && Query::of(Some("&&")).is_ok_and(|query| query.0.is_empty()));
        // What no path takes for a time.
        for text in ["nan", "inf", "-1", "1e300"] {
            let line = format!("timeout={text}");
            let number = Query::of(Some(&line)).ok().unwrap().number("timeout");
            assert!(number.is_ok_and(|n| n.is_some_and(|n| !(0.0..=300.0).contains(&n))), "{text}");
        }
    }
}
