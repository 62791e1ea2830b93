//! Models on candle that tell digits, their parameters and gradients as one flat vector, so that one AllReduce takes all.

use crate::digits::{CLASSES, Images, PIXELS};
use crate::seeded::SplitMix64;
use anyhow::{Context, Result, ensure};
use candle_core::{D, Device, Tensor, Var};
use candle_nn::{loss, ops};

/// Widths of the perceptron's layers, inputs and outputs included: 301 066 parameters, 1.2 MB of gradients a step.
pub const WIDTHS: [usize; 4] = [PIXELS, 512, 512, CLASSES];

/// Pixels of a side, and channels after the first and the later convolutions.
const SIDE: usize = 8;
const CHANNELS: [usize; 2] = [16, 32];
/// Width of the convolutional network's hidden layer.
const HIDDEN: usize = 128;

/// The transformer's tokens: patches of so many pixels a side.
const PATCH: usize = 2;
const TOKENS: usize = (SIDE / PATCH) * (SIDE / PATCH);
const WIDTH: usize = 64;
const HEADS: usize = 4;
const BLOCKS: usize = 2;

/// What kind of model.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// A multi-layer perceptron of [`WIDTHS`].
    #[default]
    Perceptron,
    /// Three convolutions and two layers behind: 81 002 parameters.
    Convolutional,
    /// Two blocks of attention over 16 patches, normalised first (Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021;
    /// Xiong et al., On Layer Normalization in the Transformer Architecture, ICML 2020): 102 090 parameters.
    Transformer,
}

impl Kind {
    /// The learning rate that suits it, with a momentum of 0.9.
    pub fn rate(self) -> f32 {
        match self {
            Self::Perceptron | Self::Convolutional => 0.05,
            Self::Transformer => 0.02,
        }
    }
}

/// How a parameter begins.
enum Begin {
    /// Uniform, with He's bound for so many inputs.
    Random(usize),
    /// All the same.
    At(f32),
}

/// The model. SiLU between its layers: smooth, so that a last bit that differs cannot tip a unit over a kink and change a
/// gradient at once, as it can with ReLU (there the curves of two summation orders part by 1e-3; here by 1e-5).
pub struct Model {
    kind: Kind,
    variables: Vec<Var>,
    device: Device,
}

/// Parameters in the order in which layers take them.
struct Parameters<'a>(std::slice::Iter<'a, Var>);

impl Parameters<'_> {
    fn next(&mut self) -> Result<&Tensor> {
        Ok(self.0.next().context("too few parameters")?.as_tensor())
    }

    /// The last dimension through weights of (outputs, inputs) and biases.
    fn linear(&mut self, values: &Tensor) -> Result<Tensor> {
        let mut flat = values.dims().to_vec();
        let inputs = flat.pop().context("no dimension")?;
        let weights = self.next()?;
        flat.push(weights.dim(0)?);
        let product = values.reshape(((), inputs))?.matmul(&weights.t()?)?;
        Ok(product.broadcast_add(self.next()?)?.reshape(flat)?)
    }

    /// A convolution of 3 x 3 that keeps the size.
    fn convolution(&mut self, values: &Tensor) -> Result<Tensor> {
        let sums = values.conv2d(self.next()?, 1, 1, 1, 1)?;
        let biases = self.next()?;
        Ok(sums.broadcast_add(&biases.reshape((1, biases.dim(0)?, 1, 1))?)?)
    }

    /// Each token's values with mean 0 and variance 1, scaled and moved.
    fn normalise(&mut self, values: &Tensor) -> Result<Tensor> {
        let centred = values.broadcast_sub(&values.mean_keepdim(D::Minus1)?)?;
        let variance = (centred.sqr()?.mean_keepdim(D::Minus1)? + 1e-5)?;
        let normal = centred.broadcast_div(&variance.sqrt()?)?;
        Ok(normal.broadcast_mul(self.next()?)?.broadcast_add(self.next()?)?)
    }

    /// Attention of all tokens to all, in several heads.
    fn attention(&mut self, values: &Tensor) -> Result<Tensor> {
        let images = values.dim(0)?;
        let apart = self.linear(values)?.reshape((images, TOKENS, 3, HEADS, WIDTH / HEADS))?;
        let apart = apart.permute((2, 0, 3, 1, 4))?.contiguous()?;
        let part = |at| -> Result<Tensor> { Ok(apart.narrow(0, at, 1)?.squeeze(0)?.contiguous()?) };
        let (queries, keys, contents) = (part(0)?, part(1)?, part(2)?);
        let scale = ((WIDTH / HEADS) as f64).sqrt();
        let weights = (queries.matmul(&keys.t()?.contiguous()?)? / scale)?;
        let heads = ops::softmax(&weights, D::Minus1)?.matmul(&contents)?;
        let together = heads.permute((0, 2, 1, 3))?.contiguous()?.reshape((images, TOKENS, WIDTH))?;
        self.linear(&together)
    }
}

fn layer(inputs: usize, outputs: usize) -> [(Vec<usize>, Begin); 2] {
    [(vec![outputs, inputs], Begin::Random(inputs)), (vec![outputs], Begin::At(0.0))]
}

fn convolution(inputs: usize, outputs: usize) -> [(Vec<usize>, Begin); 2] {
    [(vec![outputs, inputs, 3, 3], Begin::Random(9 * inputs)), (vec![outputs], Begin::At(0.0))]
}

fn normal() -> [(Vec<usize>, Begin); 2] {
    [(vec![WIDTH], Begin::At(1.0)), (vec![WIDTH], Begin::At(0.0))]
}

/// Shapes and beginnings of all parameters, in order.
fn shapes(kind: Kind) -> Vec<(Vec<usize>, Begin)> {
    match kind {
        Kind::Perceptron => {
            WIDTHS.iter().zip(WIDTHS.iter().skip(1)).flat_map(|(from, to)| layer(*from, *to)).collect()
        }
        Kind::Convolutional => {
            let [few, many] = CHANNELS;
            let convolutions = [convolution(1, few), convolution(few, many), convolution(many, many)];
            let behind = [layer(many * (SIDE / 2).pow(2), HIDDEN), layer(HIDDEN, CLASSES)];
            convolutions.into_iter().chain(behind).flatten().collect()
        }
        Kind::Transformer => {
            let places = (vec![TOKENS, WIDTH], Begin::Random(WIDTH));
            let block = || {
                let attention = [normal(), layer(WIDTH, 3 * WIDTH), layer(WIDTH, WIDTH)];
                let behind = [normal(), layer(WIDTH, 4 * WIDTH), layer(4 * WIDTH, WIDTH)];
                attention.into_iter().chain(behind).flatten()
            };
            let first = layer(PATCH * PATCH, WIDTH).into_iter().chain([places]);
            let last = normal().into_iter().chain(layer(WIDTH, CLASSES));
            first.chain((0..BLOCKS).flat_map(|_| block())).chain(last).collect()
        }
    }
}

impl Model {
    /// A model with random weights that follow from `seed`, and biases 0. Weights are uniform with He's bound
    /// `sqrt(6 / inputs)` (He et al., Delving Deep into Rectifiers, ICCV 2015).
    pub fn new(kind: Kind, seed: u64) -> Result<Self> {
        let device = Device::Cpu;
        let (mut variables, mut number) = (Vec::new(), 0);
        for (shape, begin) in shapes(kind) {
            let count = shape.iter().product();
            let values: Vec<f32> = match begin {
                Begin::At(value) => vec![value; count],
                Begin::Random(inputs) => {
                    let mut random = SplitMix64::named(seed, &[0x0077_6569_6768_7473, number]);
                    number += 1;
                    let bound = (6.0 / inputs as f32).sqrt();
                    (0..count).map(|_| (random.unit_f32() * 2.0 - 1.0) * bound).collect()
                }
            };
            variables.push(Var::from_vec(values, shape, &device)?);
        }
        Ok(Self { kind, variables, device })
    }

    /// How many parameters.
    pub fn parameter_count(&self) -> usize {
        self.variables.iter().map(|variable| variable.elem_count()).sum()
    }

    /// All parameters, layer by layer, weights before biases.
    pub fn parameters(&self) -> Result<Vec<f32>> {
        let mut flat = Vec::with_capacity(self.parameter_count());
        for variable in self.variables.iter() {
            flat.extend(variable.as_tensor().flatten_all()?.to_vec1::<f32>()?);
        }
        Ok(flat)
    }

    /// Replaces all parameters.
    pub fn set_parameters(&self, flat: &[f32]) -> Result<()> {
        ensure!(flat.len() == self.parameter_count(), "{} parameters are not the model's", flat.len());
        let mut rest = flat;
        for variable in self.variables.iter() {
            let (part, after) = rest.split_at_checked(variable.elem_count()).context("too few parameters")?;
            variable.set(&Tensor::from_slice(part, variable.shape(), &self.device)?)?;
            rest = after;
        }
        Ok(())
    }

    fn logits(&self, images: &Images) -> Result<Tensor> {
        let pixels = Tensor::from_slice(&images.pixels, (images.len(), PIXELS), &self.device)?;
        let mut layers = Parameters(self.variables.iter());
        match self.kind {
            Kind::Perceptron => {
                let first = layers.linear(&pixels)?.silu()?;
                let second = layers.linear(&first)?.silu()?;
                layers.linear(&second)
            }
            Kind::Convolutional => {
                let mut values = pixels.reshape((images.len(), 1, SIDE, SIDE))?;
                values = layers.convolution(&values)?.silu()?;
                values = layers.convolution(&values)?.silu()?.avg_pool2d(2)?;
                values = layers.convolution(&values)?.silu()?.flatten_from(1)?;
                values = layers.linear(&values)?.silu()?;
                layers.linear(&values)
            }
            Kind::Transformer => {
                let patches = pixels.reshape((images.len(), SIDE / PATCH, PATCH, SIDE / PATCH, PATCH))?;
                let patches = patches.permute((0, 1, 3, 2, 4))?.contiguous()?;
                let patches = patches.reshape((images.len(), TOKENS, PATCH * PATCH))?;
                let mut values = layers.linear(&patches)?.broadcast_add(layers.next()?)?;
                for _ in 0..BLOCKS {
                    let normal = layers.normalise(&values)?;
                    values = (values + layers.attention(&normal)?)?;
                    let normal = layers.normalise(&values)?;
                    let wide = layers.linear(&normal)?.silu()?;
                    values = (values + layers.linear(&wide)?)?;
                }
                let normal = layers.normalise(&values)?;
                layers.linear(&normal.mean(1)?)
            }
        }
    }

    /// Computes the mean cross entropy over the images, and its gradient by every parameter. The gradients go to
    /// `gradients` in the order of [`Model::parameters`].
    pub fn gradients(&self, images: &Images, gradients: &mut Vec<f32>) -> Result<f32> {
        let labels = Tensor::from_slice(&images.labels, images.len(), &self.device)?;
        let loss = loss::cross_entropy(&self.logits(images)?, &labels)?;
        let store = loss.backward()?;
        gradients.clear();
        for variable in self.variables.iter() {
            let gradient = store.get(variable.as_tensor()).context("a parameter without gradient")?;
            gradients.extend(gradient.flatten_all()?.to_vec1::<f32>()?);
        }
        Ok(loss.to_scalar::<f32>()?)
    }

    /// How many of the images the model tells right.
    pub fn correct(&self, images: &Images) -> Result<usize> {
        let found = self.logits(images)?.argmax(1)?.to_vec1::<u32>()?;
        Ok(found.iter().zip(&images.labels).filter(|(found, label)| found == label).count())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digits::Digits;

    #[test]
    fn parameters_come_back_as_they_were_set() {
        for (kind, count) in
            [(Kind::Perceptron, 301_066), (Kind::Convolutional, 81_002), (Kind::Transformer, 102_090)]
        {
            let model = Model::new(kind, 1).unwrap();
            assert_eq!(model.parameter_count(), count, "{kind:?}");
            let wanted: Vec<f32> = (0..count).map(|number| number as f32).collect();
            model.set_parameters(&wanted).unwrap();
            assert_eq!(model.parameters().unwrap(), wanted);
            assert!(model.set_parameters(&wanted[1..]).is_err());
            let [one, other] = [3, 3].map(|seed| Model::new(kind, seed).unwrap().parameters().unwrap());
            assert_eq!(one, other);
        }
    }

    #[test]
    fn gradient_is_the_slope_of_the_loss() {
        let images = Digits::load(1).unwrap().training.select(&(0..32).collect::<Vec<_>>()).unwrap();
        for kind in [Kind::Perceptron, Kind::Convolutional, Kind::Transformer] {
            let model = Model::new(kind, 1).unwrap();
            let (mut gradients, mut other) = (Vec::new(), Vec::new());
            let base = model.gradients(&images, &mut gradients).unwrap();
            // A step of length 1e-3 against the gradient must lower the loss by about 1e-3 times the gradient's length.
            let length = gradients.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt() as f32;
            let mut parameters = model.parameters().unwrap();
            parameters.iter_mut().zip(&gradients).for_each(|(p, g)| *p -= 1e-3 * g / length);
            model.set_parameters(&parameters).unwrap();
            let moved = model.gradients(&images, &mut other).unwrap();
            let (expected, found) = (1e-3 * length, base - moved);
            assert!(
                (found / expected - 1.0).abs() < 0.05,
                "{kind:?}: expected a fall by {expected}, found {found}"
            );
        }
    }
}
