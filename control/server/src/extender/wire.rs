//! What kube-scheduler and an extender say to each other: the few fields that are needed of `k8s.io/kube-scheduler/extender/v1`.

use crate::state::NextWorker;
use harmonaize_abi::session::is_name;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The label with a job's name. Pods without it are none of ours.
const JOB: &str = "harmonaize.dev/job";

/// The label with a tenant's name. Without it the tenant is the first one of the pod's namespace.
const TENANT: &str = "harmonaize.dev/tenant";

/// The label with the number of a job's workers.
const WORKERS: &str = "harmonaize.dev/workers";

/// Most characters of a label that an answer repeats. A label of Kubernetes has no more.
const MOST_CHARS: usize = 63;

/// `ExtenderArgs`.
#[derive(Debug, Deserialize)]
pub(super) struct Args {
    #[serde(rename = "Pod")]
    pub pod: Pod,
    /// Absent where the scheduler sends whole nodes.
    #[serde(rename = "NodeNames")]
    pub node_names: Option<Vec<String>>,
}

/// `Pod`.
#[derive(Debug, Deserialize)]
pub(super) struct Pod {
    #[serde(default)]
    pub metadata: Metadata,
}

/// `ObjectMeta`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Metadata {
    pub namespace: String,
    pub uid: String,
    pub labels: Option<BTreeMap<String, String>>,
}

/// What is wrong with a pod's labels.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum LabelError {
    /// The job's name.
    #[error("label {JOB}: `{0}` is no job's name: give 1 to 63 letters, digits, dashes, dots or underscores")]
    Job(String),
    /// A tenant of other namespaces.
    #[error(
        "label {TENANT}: the pod's namespace has no pods of tenant `{0}`; name one that it has, or have the \
         provider allow it in scheduler_namespaces"
    )]
    Tenant(String),
    /// The number of workers.
    #[error("label {WORKERS}: `{0}` is no number of workers: give 1 to {max}", max = u32::MAX)]
    Workers(String),
}

/// `ExtenderFilterResult`.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct FilterResult {
    pub node_names: Vec<String>,
    /// Nodes that are left out, each with why.
    pub failed_nodes: BTreeMap<String, String>,
    /// The same: none of them can be used were other pods gone.
    pub failed_and_unresolvable_nodes: BTreeMap<String, String>,
    /// Always empty: what is wrong with a request is an answer of HTTP.
    pub error: String,
}

/// `HostPriority`.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct HostPriority {
    pub host: String,
    /// 0 to 10.
    pub score: u8,
}

impl Metadata {
    /// The worker that a pod has; none where it is of no job of ours. Who makes a pod writes its labels, and so `namespaces` says which
    /// tenants it may name. A namespace that is not there has the one of its own name.
    ///
    /// # Errors
    /// What of its labels makes no sense, or is not for it to say.
    pub(super) fn worker(
        &self,
        namespaces: &BTreeMap<String, Vec<String>>,
    ) -> Result<Option<NextWorker>, LabelError> {
        let label = |name: &str| self.labels.as_ref().and_then(|labels| labels.get(name));
        let shown = |text: &String| text.chars().take(MOST_CHARS).collect::<String>();
        let Some(job) = label(JOB) else { return Ok(None) };
        if !is_name(job) || job.chars().count() > MOST_CHARS {
            return Err(LabelError::Job(shown(job)));
        }
        let workers = match label(WORKERS) {
            None => usize::MAX,
            Some(text) => match text.parse::<u32>() {
                Ok(workers) if workers > 0 => workers as usize,
                _ => return Err(LabelError::Workers(shown(text))),
            },
        };
        let own = std::slice::from_ref(&self.namespace);
        let allowed = namespaces.get(&self.namespace).map_or(own, Vec::as_slice);
        let tenant = label(TENANT).or(allowed.first()).unwrap_or(&self.namespace);
        if !allowed.contains(tenant) {
            return Err(LabelError::Tenant(shown(tenant)));
        }
        Ok(Some(NextWorker { tenant: shown(tenant), job: job.clone(), workers, assumed: Vec::new() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(metadata: &str) -> Result<Option<NextWorker>, LabelError> {
        let namespaces = BTreeMap::from([("shared".to_owned(), ["b", "c"].map(str::to_owned).to_vec())]);
        serde_json::from_str::<Metadata>(metadata).unwrap().worker(&namespaces)
    }

    #[test]
    fn labels_name_tenant_job_and_workers() {
        let of = |tenant: &str, workers| NextWorker {
            tenant: tenant.to_owned(),
            job: "train".to_owned(),
            workers,
            assumed: Vec::new(),
        };
        let by_namespace = worker(r#"{"namespace":"a","labels":{"harmonaize.dev/job":"train"}}"#);
        assert_eq!(by_namespace, Ok(Some(of("a", usize::MAX))));
        let labels =
            r#"{"harmonaize.dev/job":"train","harmonaize.dev/tenant":"b","harmonaize.dev/workers":"16"}"#;
        let by_label =
            |namespace: &str| worker(&format!(r#"{{"namespace":"{namespace}","labels":{labels}}}"#));
        assert_eq!(by_label("b"), Ok(Some(of("b", 16))));
        assert_eq!(by_label("shared"), Ok(Some(of("b", 16))));
        for foreign in ["{}", r#"{"labels":null}"#, r#"{"labels":{"app":"web"},"name":"web-0"}"#] {
            assert_eq!(worker(foreign), Ok(None), "{foreign}");
        }
    }

    #[test]
    fn a_namespace_has_its_own_tenants_alone() {
        let of = |namespace: &str, label: &str| {
            let labels = format!(r#"{{"harmonaize.dev/job":"j"{label}}}"#);
            let worker = worker(&format!(r#"{{"namespace":"{namespace}","labels":{labels}}}"#));
            worker.map(|worker| worker.unwrap().tenant)
        };
        let label = |tenant: &str| format!(r#","harmonaize.dev/tenant":"{tenant}""#);
        let refused = |tenant: &str| Err(LabelError::Tenant(tenant.to_owned()));
        assert_eq!(of("a", &label("a")), Ok("a".to_owned()));
        assert_eq!(of("a", &label("b")), refused("b"));
        assert_eq!(of("shared", &label("c")), Ok("c".to_owned()));
        assert_eq!(of("shared", ""), Ok("b".to_owned()));
        for other in ["a", "shared", ""] {
            assert_eq!(of("shared", &label(other)), refused(other));
        }
        assert_eq!(of("a", &label(&"x".repeat(70))), refused(&"x".repeat(63)));
    }

    #[test]
    fn senseless_labels_are_named() {
        let job = |job: &str| worker(&format!(r#"{{"labels":{{"harmonaize.dev/job":"{job}"}}}}"#));
        assert_eq!(job(""), Err(LabelError::Job(String::new())));
        assert_eq!(job(&"x".repeat(64)), Err(LabelError::Job("x".repeat(63))));
        for workers in ["0", "-1", "many", "4294967296", ""] {
            let labels = format!(r#"{{"harmonaize.dev/job":"j","harmonaize.dev/workers":"{workers}"}}"#);
            let refused = worker(&format!(r#"{{"labels":{labels}}}"#));
            assert_eq!(refused, Err(LabelError::Workers(workers.to_owned())));
        }
    }
}
