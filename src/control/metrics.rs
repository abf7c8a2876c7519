//! GET /metrics. The counters stand with those who count; this reads them when somebody asks.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::State;
use crate::fuse::abi::Opcode;
use crate::fuse::metrics::CLASSES;
use crate::fuse::throttle::Kind;
use crate::limits;

/// The type of the text: prometheus-client writes OpenMetrics.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// All metrics, as text.
pub fn encode(state: &Arc<State>) -> String {
    let mut registry = Registry::with_prefix("thruway");
    registry.register_collector(Box::new(All(state.clone())));
    let mut all = String::new();
    // Writing to a String does not fail.
    let _ = text::encode(&mut all, &registry);
    all
}

struct All(Arc<State>);

impl fmt::Debug for All {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("All")
    }
}

/// A metric without labels, or with one label.
struct Metrics<'a>(DescriptorEncoder<'a>);

/// A value as a gauge has it.
fn level(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

type Labelled = (&'static str, String, u64);

impl Metrics<'_> {
    fn counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        metric.encode_counter::<NoLabelSet, u64, f64>(&value, None)
    }

    fn gauge(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        self.0.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&level(value))
    }

    fn counters(&mut self, name: &str, help: &str, values: impl IntoIterator<Item = Labelled>) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        values.into_iter().try_for_each(|(label, text, value)| {
            metric.encode_family(&[(label, text)])?.encode_counter::<NoLabelSet, u64, f64>(&value, None)
        })
    }

    fn gauges(&mut self, name: &str, help: &str, values: impl IntoIterator<Item = Labelled>) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        values
            .into_iter()
            .try_for_each(|(label, text, value)| metric.encode_family(&[(label, text)])?.encode_gauge(&level(value)))
    }
}

impl Collector for All {
    fn encode(&self, encoder: DescriptorEncoder) -> fmt::Result {
        let mut metrics = Metrics(encoder);
        self.requests(&mut metrics)?;
        self.queues(&mut metrics)?;
        self.resources(&mut metrics)?;
        self.guest(&mut metrics)
    }
}

impl All {
    fn requests(&self, metrics: &mut Metrics) -> fmt::Result {
        let counters = self.0.sources.server.counters();
        let of = || Opcode::ALL.iter().map(|opcode| (opcode.fuse_name(), counters.of(*opcode)));
        metrics.counters(
            "requests",
            "FUSE requests of the guest",
            of().map(|(opcode, sum)| ("opcode", opcode, sum.requests)),
        )?;
        metrics.counters(
            "request_errors",
            "FUSE requests that got an errno",
            of().map(|(opcode, sum)| ("opcode", opcode, sum.errors)),
        )?;
        let help = "How long requests took, from the daemon's first look to the answer";
        let mut times = metrics.0.encode_descriptor("request_seconds", help, None, MetricType::Histogram)?;
        for (opcode, sum) in of() {
            let count = sum.classes.iter().sum();
            if count > 0 {
                let bound = |class| if class == CLASSES - 1 { f64::INFINITY } else { f64::from(1u32 << class) / 1e6 };
                let classes: Vec<_> = sum.classes.iter().enumerate().map(|(class, n)| (bound(class), *n)).collect();
                let took = sum.took.as_secs_f64();
                times
                    .encode_family(&[("opcode", opcode)])?
                    .encode_histogram::<NoLabelSet>(took, count, &classes, None)?;
            }
        }
        let waits = self.0.sources.server.throttle().waits();
        let by_kind = |values: [u64; Kind::ALL.len()]| {
            Kind::ALL.into_iter().zip(values).map(|(kind, n)| ("kind", kind.name().to_owned(), n))
        };
        let help = "Requests that had to wait, since the guest was at its limit";
        metrics.counters("limited_requests", help, by_kind(waits.so_far))?;
        metrics.gauges(
            "limited_requests_waiting",
            "Requests that wait, since the guest is at its limit",
            by_kind(waits.now),
        )?;
        metrics.counter("read_bytes", "Bytes that the guest has read by READ", counters.read_bytes())?;
        metrics.counter("written_bytes", "Bytes that the guest has written by WRITE", counters.written_bytes())
    }

    fn queues(&self, metrics: &mut Metrics) -> fmt::Result {
        let device = &self.0.sources.device;
        metrics.gauges(
            "queue_requests",
            "Requests that the daemon has taken and not answered",
            device.queues().into_iter().map(|queue| ("queue", queue.index.to_string(), queue.in_flight.into())),
        )?;
        let work = device.work();
        let polls = [("found", work.found), ("slept", work.slept)];
        metrics.counters(
            "polls",
            "Times that a worker polled its empty queue",
            polls.map(|(result, n)| ("result", result.to_owned(), n)),
        )?;
        let offloaded = [("thread", work.handovers), ("io_uring", work.submissions)];
        metrics.counters(
            "offloaded_requests",
            "Requests that a queue's worker did not serve by itself",
            offloaded.map(|(to, n)| ("to", to.to_owned(), n)),
        )
    }

    fn resources(&self, metrics: &mut Metrics) -> fmt::Result {
        let sources = &self.0.sources;
        let fs = sources.server.fs();
        if let Some(open) = fs.descriptors() {
            metrics.gauge("descriptors", "Open descriptors of the daemon", open)?;
        }
        metrics.gauge("descriptors_limit", "The limit of open descriptors", self.0.descriptors)?;
        metrics.gauge("inodes", "Inodes that the guest knows", fs.known_inodes() as u64)?;
        metrics.gauge("inodes_limit", "The limit of inodes that the guest knows", fs.max_inodes() as u64)?;
        metrics.gauge("handles", "Open files and directories of the guest", fs.open_handles() as u64)?;
        let [dax, passthrough] = sources.window.as_ref().map_or([0; 2], |window| window.live_mappings());
        let by_window = |values: [u64; 2]| ["dax", "passthrough"].into_iter().zip(values);
        metrics.gauges(
            "mappings",
            "Live mappings",
            by_window([dax, passthrough]).map(|(window, n)| ("window", window.to_owned(), n)),
        )?;
        metrics.gauge("mappings_limit", "The limit of live mappings", sources.facts.max_mappings.into())?;
        let revoked = sources.window.as_ref().map_or([0; 2], |window| window.revocations());
        metrics.counters(
            "revocations",
            "Mappings that were taken back",
            by_window(revoked).map(|(window, n)| ("window", window.to_owned(), n)),
        )?;
        metrics.counters(
            "limit_reached",
            "Times that a limit refused or dropped something",
            limits::Limit::ALL.iter().map(|limit| ("limit", limit.name().to_owned(), limit.times())),
        )
    }

    fn guest(&self, metrics: &mut Metrics) -> fmt::Result {
        let sources = &self.0.sources;
        let watched = sources.server.fs().watched().unwrap_or_default();
        metrics.gauge("watch_marks", "fanotify marks", watched.marks as u64)?;
        metrics.gauge("watch_nodes", "Files and directories whose changes are told", watched.nodes as u64)?;
        metrics.counter("watch_events", "Events of the host that were taken up", watched.events)?;
        let agent = sources.server.fs().agent_facts();
        metrics.gauge("agent_threads", "Threads of the guest agent", agent.threads as u64)?;
        metrics.gauge("agent_waiting", "Changes that wait for the guest agent", agent.waiting as u64)?;
        let counts = agent.counts;
        metrics.counters(
            "agent_changes",
            "Changes that the guest agent repeated, could not repeat, and times that changes were lost",
            [("repeated", counts.repeated), ("failed", counts.failed), ("lost", counts.lost)]
                .into_iter()
                .map(|(result, n)| ("result", result.to_owned(), n)),
        )?;
        let uptime = sources.facts.since.elapsed().as_secs_f64();
        let help = "Seconds since the start";
        metrics.0.encode_descriptor("uptime_seconds", help, None, MetricType::Gauge)?.encode_gauge(&uptime)?;
        let mut build = metrics.0.encode_descriptor("build", "The daemon", None, MetricType::Info)?;
        build.encode_info(&[("version", env!("CARGO_PKG_VERSION"))])
    }
}
