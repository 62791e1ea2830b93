//! From numbers for each two ranks to a guess of who stands with whom. It is a logistic regression, learnt where the truth is
//! known, then average linkage by log odds. The adversary can run the provider's software itself.
//! The allocator's tests of what prices tell use it, too.

/// Steps of Newton's method, and the ridge.
const STEPS: usize = 12;
const RIDGE: f64 = 1.0;

/// Weighs evidence.
struct Judge {
    means: Vec<f64>,
    scales: Vec<f64>,
    /// The last is the constant.
    weights: Vec<f64>,
    /// Where clusters are joined no more.
    stop: f64,
}

impl Judge {
    /// Learns from rows of numbers, each with whether the two stand together. What is not known is no number.
    fn learn(rows: &[(Vec<f64>, bool)]) -> Self {
        let width = rows[0].0.len();
        let column = |at: usize| rows.iter().map(move |(row, _)| row[at]).filter(|value| value.is_finite());
        let mean = |at: usize| column(at).sum::<f64>() / column(at).count().max(1) as f64;
        let means: Vec<f64> = (0..width).map(mean).collect();
        let spread = |at: usize| {
            let squares = column(at).map(|value| (value - means[at]).powi(2));
            (squares.sum::<f64>() / column(at).count().max(1) as f64).sqrt()
        };
        let scales = (0..width).map(spread).collect();
        let mut judge = Self { means, scales, weights: vec![0.0; width + 1], stop: 0.0 };
        let scaled: Vec<(Vec<f64>, f64)> =
            rows.iter().map(|(row, is)| (judge.scaled(row), f64::from(u8::from(*is)))).collect();
        for _ in 0..STEPS {
            let size = width + 1;
            let mut slope = vec![0.0; size];
            let mut curve = vec![vec![0.0; size]; size];
            for (row, is) in &scaled {
                let odds: f64 = row.iter().zip(&judge.weights).map(|(value, weight)| value * weight).sum();
                let likely = 1.0 / (1.0 + (-odds).exp());
                let sure = (likely * (1.0 - likely)).max(1e-6);
                for a in 0..size {
                    slope[a] += (is - likely) * row[a];
                    for b in 0..size {
                        curve[a][b] += sure * row[a] * row[b];
                    }
                }
            }
            for a in 0..size {
                curve[a][a] += if a < width { RIDGE } else { 1e-9 };
                slope[a] -= if a < width { RIDGE * judge.weights[a] } else { 0.0 };
            }
            let step = solve(curve, slope);
            judge.weights.iter_mut().zip(step).for_each(|(weight, step)| *weight += step.clamp(-3.0, 3.0));
        }
        judge
    }

    fn scaled(&self, row: &[f64]) -> Vec<f64> {
        let each = row.iter().zip(self.means.iter().zip(&self.scales));
        let known = |(value, (mean, scale)): (&f64, (&f64, &f64))| match value.is_finite() && *scale > 1e-12 {
            true => (value - mean) / scale,
            false => 0.0,
        };
        each.map(known).chain([1.0]).collect()
    }

    /// Log odds that the two stand together.
    fn odds(&self, row: &[f64]) -> f64 {
        self.scaled(row).iter().zip(&self.weights).map(|(value, weight)| value * weight).sum()
    }
}

/// Gauss's elimination with pivots.
fn solve(mut matrix: Vec<Vec<f64>>, mut right: Vec<f64>) -> Vec<f64> {
    let size = right.len();
    for at in 0..size {
        let pivot = (at..size).max_by(|a, b| matrix[*a][at].abs().total_cmp(&matrix[*b][at].abs())).unwrap();
        matrix.swap(at, pivot);
        right.swap(at, pivot);
        let (top, scale) = (matrix[at].clone(), matrix[at][at]);
        for below in at + 1..size {
            let factor = matrix[below][at] / scale;
            for (cell, top) in matrix[below].iter_mut().zip(&top) {
                *cell -= factor * top;
            }
            right[below] -= factor * right[at];
        }
    }
    for at in (0..size).rev() {
        let known: f64 = (at + 1..size).map(|right_of| matrix[at][right_of] * right[right_of]).sum();
        right[at] = (right[at] - known) / matrix[at][at];
    }
    right
}

/// Numbers for each two members of a fabric, and with whom each stands in truth.
pub(super) struct Puzzle {
    fabric: usize,
    truth: Vec<usize>,
    /// By pairs, in order.
    rows: Vec<Vec<f64>>,
}

impl Puzzle {
    /// Of a fabric of that number.
    pub(super) fn new(fabric: usize, truth: &[usize], numbers: impl Fn(usize, usize) -> Vec<f64>) -> Self {
        let rows = pairs(truth.len()).map(|(i, j)| numbers(i, j)).collect();
        Self { fabric, truth: truth.to_vec(), rows }
    }

    fn odds(&self, judge: &Judge) -> Vec<Vec<f64>> {
        let members = self.truth.len();
        let mut all = vec![vec![0.0; members]; members];
        for ((i, j), row) in pairs(members).zip(&self.rows) {
            all[i][j] = judge.odds(row);
            all[j][i] = all[i][j];
        }
        all
    }

    fn solved(&self) -> impl Iterator<Item = (Vec<f64>, bool)> + '_ {
        let is = |(i, j): (usize, usize)| self.truth[i] == self.truth[j];
        self.rows.iter().zip(pairs(self.truth.len())).map(move |(row, pair)| (row.clone(), is(pair)))
    }
}

fn pairs(members: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..members).flat_map(move |i| (i + 1..members).map(move |j| (i, j)))
}

/// Each fabric's adjusted Rand index on average over its puzzles. The guesses are by who has learnt on the fabrics of the other parts.
pub(super) fn indices(puzzles: &[Puzzle]) -> Vec<f64> {
    let fabrics = puzzles.iter().map(|puzzle| puzzle.fabric + 1).max().unwrap_or(0);
    let parts = if fabrics < 40 { 2 } else { 4 };
    let mut found = vec![Vec::new(); fabrics];
    for part in 0..parts {
        let (unknown, known): (Vec<&Puzzle>, Vec<&Puzzle>) =
            puzzles.iter().partition(|puzzle| puzzle.fabric % parts == part);
        let rows: Vec<(Vec<f64>, bool)> = known.iter().flat_map(|puzzle| puzzle.solved()).collect();
        let mut judge = Judge::learn(&rows);
        let guessed: Vec<(Vec<Vec<f64>>, &[usize])> =
            known.iter().map(|puzzle| (puzzle.odds(&judge), puzzle.truth.as_slice())).collect();
        let score = |stop: f64| -> f64 {
            guessed.iter().map(|(odds, truth)| adjusted_rand(&cluster(odds, stop), truth)).sum()
        };
        let stops = (-20..=8).map(|step| f64::from(step) / 4.0);
        judge.stop = stops.max_by(|a, b| score(*a).total_cmp(&score(*b))).unwrap();
        for puzzle in unknown {
            let guess = cluster(&puzzle.odds(&judge), judge.stop);
            found[puzzle.fabric].push(adjusted_rand(&guess, &puzzle.truth));
        }
    }
    found.iter().map(|of_one| mean(of_one)).collect()
}

pub(super) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Mean of the differences, and its standard error.
pub(super) fn gain(found: &[f64], base: &[f64]) -> (f64, f64) {
    let each: Vec<f64> = found.iter().zip(base).map(|(found, base)| found - base).collect();
    let middle = mean(&each);
    let square = each.iter().map(|gain| (gain - middle).powi(2)).sum::<f64>() / (each.len() - 1) as f64;
    (middle, (square / each.len() as f64).sqrt())
}

/// Joins the two clusters whose members are on average the likeliest to stand together. It goes on as long as that is above `stop`.
fn cluster(odds: &[Vec<f64>], stop: f64) -> Vec<usize> {
    let mut clusters: Vec<Vec<usize>> = (0..odds.len()).map(|rank| vec![rank]).collect();
    loop {
        let mut best = (stop, None);
        for a in 0..clusters.len() {
            for b in a + 1..clusters.len() {
                let all = clusters[a].iter().flat_map(|i| clusters[b].iter().map(|j| odds[*i][*j]));
                let mean = all.sum::<f64>() / (clusters[a].len() * clusters[b].len()) as f64;
                if mean > best.0 {
                    best = (mean, Some((a, b)));
                }
            }
        }
        let Some((a, b)) = best.1 else { break };
        let joined = clusters.remove(b);
        clusters[a].extend(joined);
    }
    let mut of = vec![0; odds.len()];
    for (number, cluster) in clusters.iter().enumerate() {
        cluster.iter().for_each(|rank| of[*rank] = number);
    }
    of
}

/// The adjusted Rand index of two partitions: 1 where they are the same, 0 on average by chance. Source: Hubert and Arabie, "Comparing
/// partitions", 1985.
fn adjusted_rand(one: &[usize], other: &[usize]) -> f64 {
    let size = |of: &[usize]| of.iter().max().map_or(0, |most| most + 1);
    let mut table = vec![vec![0_u32; size(other)]; size(one)];
    one.iter().zip(other).for_each(|(a, b)| table[*a][*b] += 1);
    let pairs = |count: u32| f64::from(count) * (f64::from(count) - 1.0) / 2.0;
    let both: f64 = table.iter().flatten().map(|count| pairs(*count)).sum();
    let rows: f64 = table.iter().map(|row| pairs(row.iter().sum())).sum();
    let columns: f64 = (0..size(other)).map(|at| pairs(table.iter().map(|row| row[at]).sum())).sum();
    let by_chance = rows * columns / pairs(one.len() as u32);
    let most = (rows + columns) / 2.0;
    if most == by_chance { 1.0 } else { (both - by_chance) / (most - by_chance) }
}

/// How likely a value of those that are is above one of those that are not: 0.5 tells nothing.
pub(super) fn area(values: &[(f64, bool)]) -> f64 {
    let of = |which: bool| values.iter().filter(move |(_, is)| *is == which).map(|(value, _)| *value);
    let wins = of(true).flat_map(|yes| {
        of(false).map(move |no| match yes.total_cmp(&no) {
            std::cmp::Ordering::Greater => 1.0,
            std::cmp::Ordering::Equal => 0.5,
            std::cmp::Ordering::Less => 0.0,
        })
    });
    wins.sum::<f64>() / (of(true).count() * of(false).count()) as f64
}

#[test]
fn figures_are_what_they_are_by_hand() {
    assert_eq!(adjusted_rand(&[0, 0, 1, 1], &[5, 5, 2, 2]), 1.0);
    // Hubert and Arabie's formula: both 1, rows 2 + ..., as reckoned by hand.
    let found = adjusted_rand(&[0, 0, 0, 1, 1, 1], &[0, 0, 1, 1, 2, 2]);
    assert!((found - (2.0 - 1.2) / (4.5 - 1.2)).abs() < 1e-12, "{found}");
    assert_eq!(area(&[(1.0, false), (2.0, true), (2.0, false), (3.0, true)]), 0.875);
    // Two blobs by their odds.
    let odds = |i: usize, j: usize| if i / 3 == j / 3 { 1.0 } else { -2.0 };
    let odds: Vec<Vec<f64>> = (0..6).map(|i| (0..6).map(|j| odds(i, j)).collect()).collect();
    assert_eq!(adjusted_rand(&cluster(&odds, 0.0), &[0, 0, 0, 1, 1, 1]), 1.0);
    let rows: Vec<(Vec<f64>, bool)> =
        (0..100).map(|at| (vec![f64::from(at % 10), f64::from(at)], at % 10 >= 5)).collect();
    let judge = Judge::learn(&rows);
    assert!(judge.odds(&[9.0, 50.0]) > 2.0 && judge.odds(&[0.0, 50.0]) < -2.0);
}
