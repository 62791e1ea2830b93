//! Sia's public artifact (github.com/siasosp23/artifacts): its inventory, its measured profiles, and its workloads, from the text of its
//! files. It states no licence, so that nothing of it is in this tree; what is not in its files, but in its simulator, stands here as facts.

use crate::goodput::Noise;
use crate::inventory::{Inventory, InventoryError, Kind, KindId};
use crate::job::{Job, Ranges};
use crate::model::{Epoch, Facts, Model, ModelError};
use crate::profile::{Placement, Profile, ProfileError, Scaling, StepTime};
use std::collections::BTreeMap;
use thiserror::Error;

/// The inventory of its experiments: name, hosts, accelerators of each, and the most hosts of a job.
const KINDS: [(&str, u32, u32, u32); 3] = [("aws", 6, 4, 16), ("dgx-ext", 2, 8, 2), ("rtx", 3, 8, 3)];

/// Its models, each with a name and its epochs. The numbers behind are the seconds of a restart, what its policy takes those for,
/// and how much slower than profiles trainings were.
const MODELS: [(&str, usize, f64, f64, f64); 6] = [
    ("cifar10", 100, 50.0, 30.0, 1.8),
    ("deepspeech2", 80, 25.0, 25.0, 1.2),
    ("bert", 2, 120.0, 120.0, 1.2),
    ("yolov3", 50, 80.0, 45.0, 1.2),
    ("imagenet", 90, 250.0, 250.0, 1.2),
    ("ncf", 10, 15.0, 30.0, 1.5),
];

/// The most samples of a pass of deepspeech2 on rtx, which its profile would not show.
const DEEPSPEECH2_ON_RTX: u32 = 57;

/// The most workers of a job.
const MOST_WORKERS: u32 = 64;

/// What is wrong with a file of the artifact.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum ArtifactError {
    /// A file is missing.
    #[error("the artifact has no {path}: give the folder that has traces and workloads, sia-simulator")]
    Missing {
        /// The file's path.
        path: String,
    },
    /// A line that is not what it should be.
    #[error("{path}, line {line}: {column} is no number")]
    Value {
        /// The file's path.
        path: String,
        /// The line, from 1.
        line: usize,
        /// Which column.
        column: String,
    },
    /// A job of a model that is not known.
    #[error("{path}, line {line}: {model} is no model of the artifact")]
    Model {
        /// The file's path.
        path: String,
        /// The line, from 1.
        line: usize,
        /// The model's name.
        model: String,
    },
    /// A profile that is none.
    #[error("{path}: {error}")]
    Profile {
        /// The profile's path.
        path: String,
        /// What is wrong.
        error: ProfileError,
    },
    /// A record that is none.
    #[error(transparent)]
    Record(#[from] ModelError),
    /// No inventory.
    #[error(transparent)]
    Inventory(#[from] InventoryError),
}

/// What the artifact has.
#[derive(Debug, Clone)]
pub struct Artifact {
    /// 64 accelerators of three kinds.
    pub inventory: Inventory,
    /// Its models.
    pub models: Vec<Model>,
    /// Its workloads by path, such as `workloads/saturn/workload-1.csv`.
    pub workloads: BTreeMap<String, Vec<Job>>,
}

impl Artifact {
    /// Reads the texts of the artifact's files, by their paths within its folder `sia-simulator`. Files that are not needed may be
    /// among them.
    ///
    /// # Errors
    ///
    /// A file that is missing, or is not what it should be.
    pub fn parse(files: &BTreeMap<String, String>) -> Result<Self, ArtifactError> {
        let kind = |(name, hosts, accelerators, job_hosts): (&str, u32, u32, u32)| Kind {
            name: name.to_owned(),
            hosts,
            accelerators,
            job_hosts,
        };
        let inventory = Inventory::new(KINDS.map(kind).to_vec())?;
        let models: Vec<Model> = MODELS.iter().map(|facts| model(files, facts)).collect::<Result<_, _>>()?;
        let mut workloads = BTreeMap::new();
        for (path, text) in files.iter().filter(|(path, _)| path.starts_with("workloads/")) {
            if path.ends_with(".csv") {
                workloads.insert(path.clone(), workload(path, text, &models)?);
            }
        }
        Ok(Self { inventory, models, workloads })
    }
}

/// A table with a line of columns' names.
struct Table<'a> {
    path: &'a str,
    columns: Vec<&'a str>,
    lines: Vec<(usize, Vec<&'a str>)>,
}

impl<'a> Table<'a> {
    fn parse(path: &'a str, text: &'a str) -> Self {
        let mut lines = text.lines().enumerate().map(|(line, text)| {
            let cells = text.trim_end_matches('\r').split(',').map(str::trim).collect::<Vec<_>>();
            (line + 1, cells)
        });
        let columns = lines.next().map(|(_, names)| names).unwrap_or_default();
        Self { path, columns, lines: lines.filter(|(_, cells)| cells.len() > 1).collect() }
    }

    fn of(path: &'a str, files: &'a BTreeMap<String, String>) -> Result<Self, ArtifactError> {
        let text = files.get(path).ok_or_else(|| ArtifactError::Missing { path: path.to_owned() })?;
        Ok(Self::parse(path, text))
    }

    fn rows(&self) -> impl Iterator<Item = Line<'_, 'a>> {
        self.lines.iter().map(move |(line, cells)| Line { table: self, line: *line, cells })
    }
}

/// A line of a table.
struct Line<'t, 'a> {
    table: &'t Table<'a>,
    line: usize,
    cells: &'t [&'a str],
}

impl<'a> Line<'_, 'a> {
    fn text(&self, column: &str) -> Option<&'a str> {
        let place = self.table.columns.iter().position(|name| *name == column)?;
        self.cells.get(place).copied()
    }

    fn number<N: std::str::FromStr>(&self, column: &str) -> Result<N, ArtifactError> {
        let number = self.text(column).and_then(|text| text.parse().ok());
        number.ok_or_else(|| ArtifactError::Value {
            path: self.table.path.to_owned(),
            line: self.line,
            column: column.to_owned(),
        })
    }

    /// A whole number, which may be written with a fraction of 0.
    fn whole(&self, column: &str) -> Result<u32, ArtifactError> {
        self.number::<f64>(column).map(|value| value as u32)
    }

    fn time(&self) -> Result<StepTime, ArtifactError> {
        Ok(StepTime { step: self.number("step_time")?, exchange: self.number("sync_time")? })
    }
}

fn model(
    files: &BTreeMap<String, String>,
    (name, epochs, restart, restart_guess, slowdown): &(&str, usize, f64, f64, f64),
) -> Result<Model, ArtifactError> {
    let mut records = BTreeMap::new();
    let start = format!("traces/{name}/validation-");
    for path in files.keys() {
        let batch = path.strip_prefix(&start).and_then(|rest| rest.strip_suffix(".csv")?.parse::<u32>().ok());
        let Some(batch) = batch else { continue };
        let table = Table::of(path, files)?;
        let epoch = |line: Line<'_, '_>| {
            let noise = Noise { square: line.number("grad_sqr")?, variance: line.number("grad_var")? };
            Ok::<_, ArtifactError>(Epoch { progress: line.number("progress")?, noise })
        };
        records.insert(batch, table.rows().map(epoch).collect::<Result<_, _>>()?);
    }
    let profile = |(kind, ..): (&str, u32, u32, u32)| {
        let local_most = Some(DEEPSPEECH2_ON_RTX).filter(|_| *name == "deepspeech2" && kind == "rtx");
        profile(files, name, kind, local_most).map(Some)
    };
    let profiles = KINDS.into_iter().map(profile).collect::<Result<_, _>>()?;
    let (name, epochs) = ((*name).to_owned(), *epochs);
    let facts = Facts { name, epochs, restart: *restart, restart_guess: *restart_guess, slowdown: *slowdown };
    Ok(Model::new(facts, records, profiles)?)
}

fn profile(
    files: &BTreeMap<String, String>,
    model: &str,
    kind: &str,
    local_most: Option<u32>,
) -> Result<Profile, ArtifactError> {
    let path = format!("traces/{model}/placements-{kind}.csv");
    let table = Table::of(&path, files)?;
    let placement = |line: Line<'_, '_>| {
        // A digit for each host.
        let digits = line.text("placement").unwrap_or_default().chars().map(|digit| digit.to_digit(10));
        let shape: Option<Vec<u32>> = digits.collect();
        let shape = shape.ok_or_else(|| ArtifactError::Value {
            path: path.clone(),
            line: line.line,
            column: "placement".to_owned(),
        })?;
        Ok::<_, ArtifactError>(Placement { shape, batch: line.whole("local_bsz")?, time: line.time()? })
    };
    let placements = table.rows().map(placement).collect::<Result<_, _>>()?;
    let scaling_path = format!("traces/{model}/scalability-{kind}.csv");
    let table = Table::of(&scaling_path, files)?;
    let scaling = |line: Line<'_, '_>| {
        Ok::<_, ArtifactError>(Scaling {
            hosts: line.whole("num_nodes")?,
            workers: line.whole("num_replicas")?,
            batch: line.whole("local_bsz")?,
            time: line.time()?,
        })
    };
    let scaling = table.rows().map(scaling).collect::<Result<_, _>>()?;
    Profile::new(placements, scaling, local_most)
        .map_err(|error| ArtifactError::Profile { path: path.clone(), error })
}

fn workload(path: &str, text: &str, models: &[Model]) -> Result<Vec<Job>, ArtifactError> {
    let table = Table::parse(path, text);
    let job = |line: Line<'_, '_>| {
        let name = line.text("application").unwrap_or_default();
        let known = models.iter().enumerate().find(|(_, model)| model.facts().name == name);
        let (model, batches) = known.map(|(place, model)| (place, model.batches())).ok_or_else(|| {
            ArtifactError::Model { path: path.to_owned(), line: line.line, model: name.to_owned() }
        })?;
        Ok(Job {
            name: line.text("name").unwrap_or_default().to_owned(),
            arrival: line.number("time")?,
            model,
            workers: line.whole("num_replicas")?,
            batch: line.whole("batch_size")?,
            ranges: Ranges {
                workers: 1..=MOST_WORKERS,
                kinds: KINDS.iter().enumerate().map(|(place, _)| KindId(place)).collect(),
                batch: batches.0..=batches.1,
            },
        })
    };
    table.rows().map(job).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_read_by_their_columns_names() {
        let table = Table::parse("t.csv", "b,a\r\n1.0,x\n\n2.5,y\n");
        let rows: Vec<_> = table.rows().collect();
        let values: Vec<_> =
            rows.iter().map(|row| (row.line, row.text("a"), row.whole("b").unwrap())).collect();
        assert_eq!(values, [(2, Some("x"), 1), (4, Some("y"), 2)]);
        let wrong = rows[0].number::<f64>("a").unwrap_err();
        assert_eq!(wrong.to_string(), "t.csv, line 2: a is no number");
        assert!(rows[0].number::<f64>("c").is_err());
    }

    #[test]
    fn what_is_missing_is_named() {
        let missing = Artifact::parse(&BTreeMap::new()).unwrap_err();
        assert!(missing.to_string().contains("traces/cifar10/placements-aws.csv"), "{missing}");
        let unknown = workload("w.csv", "name,time,application\na-0,1.0,a\n", &[]).unwrap_err();
        assert_eq!(unknown.to_string(), "w.csv, line 2: a is no model of the artifact");
    }
}
