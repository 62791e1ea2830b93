//! A multi-layer perceptron on candle, its parameters and gradients as one flat vector, so that one AllReduce takes all.

use crate::digits::{CLASSES, Images, PIXELS};
use crate::seeded::SplitMix64;
use anyhow::{Context, Result, ensure};
use candle_core::{Device, Tensor, Var};
use candle_nn::{Linear, Module, loss};

/// Widths of the layers, inputs and outputs included: 301 066 parameters, 1.2 MB of gradients a step.
pub const WIDTHS: [usize; 4] = [PIXELS, 512, 512, CLASSES];

/// The model. SiLU between its layers: smooth, so that a last bit that differs cannot tip a unit over a kink and change a
/// gradient at once, as it can with ReLU (there the curves of two summation orders part by 1e-3; here by 1e-5).
pub struct Mlp {
    layers: Vec<(Var, Var)>,
    device: Device,
}

impl Mlp {
    /// A model with random weights that follow from `seed`: uniform with He's bound `sqrt(6 / inputs)`, biases 0 (He et al.,
    /// Delving Deep into Rectifiers, ICCV 2015).
    pub fn new(seed: u64) -> Result<Self> {
        let device = Device::Cpu;
        let mut layers = Vec::new();
        for (number, (inputs, outputs)) in WIDTHS.iter().zip(WIDTHS.iter().skip(1)).enumerate() {
            let mut random = SplitMix64::named(seed, &[0x0077_6569_6768_7473, number as u64]);
            let bound = (6.0 / *inputs as f32).sqrt();
            let weights: Vec<f32> =
                (0..inputs * outputs).map(|_| (random.unit_f32() * 2.0 - 1.0) * bound).collect();
            let weights = Var::from_vec(weights, (*outputs, *inputs), &device)?;
            let biases = Var::from_vec(vec![0f32; *outputs], *outputs, &device)?;
            layers.push((weights, biases));
        }
        Ok(Self { layers, device })
    }

    fn variables(&self) -> impl Iterator<Item = &Var> {
        self.layers.iter().flat_map(|(weights, biases)| [weights, biases])
    }

    /// How many parameters.
    pub fn parameter_count(&self) -> usize {
        self.variables().map(|variable| variable.elem_count()).sum()
    }

    /// All parameters, layer by layer, weights before biases.
    pub fn parameters(&self) -> Result<Vec<f32>> {
        let mut flat = Vec::with_capacity(self.parameter_count());
        for variable in self.variables() {
            flat.extend(variable.as_tensor().flatten_all()?.to_vec1::<f32>()?);
        }
        Ok(flat)
    }

    /// Replaces all parameters.
    pub fn set_parameters(&self, flat: &[f32]) -> Result<()> {
        ensure!(flat.len() == self.parameter_count(), "{} parameters are not the model's", flat.len());
        let mut rest = flat;
        for variable in self.variables() {
            let (part, after) = rest.split_at_checked(variable.elem_count()).context("too few parameters")?;
            variable.set(&Tensor::from_slice(part, variable.shape(), &self.device)?)?;
            rest = after;
        }
        Ok(())
    }

    fn logits(&self, images: &Images) -> Result<Tensor> {
        let mut values = Tensor::from_slice(&images.pixels, (images.len(), PIXELS), &self.device)?;
        for (number, (weights, biases)) in self.layers.iter().enumerate() {
            let layer = Linear::new(weights.as_tensor().clone(), Some(biases.as_tensor().clone()));
            values = layer.forward(&values)?;
            if number + 1 < self.layers.len() {
                values = values.silu()?;
            }
        }
        Ok(values)
    }

    /// The mean cross entropy over the images, and its gradient by every parameter, written to `gradients` in the order of
    /// [`Mlp::parameters`].
    pub fn gradients(&self, images: &Images, gradients: &mut Vec<f32>) -> Result<f32> {
        let labels = Tensor::from_slice(&images.labels, images.len(), &self.device)?;
        let loss = loss::cross_entropy(&self.logits(images)?, &labels)?;
        let store = loss.backward()?;
        gradients.clear();
        for variable in self.variables() {
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
        let model = Mlp::new(1).unwrap();
        assert_eq!(model.parameter_count(), 301_066);
        let wanted: Vec<f32> = (0..301_066).map(|number| number as f32).collect();
        model.set_parameters(&wanted).unwrap();
        assert_eq!(model.parameters().unwrap(), wanted);
        assert!(model.set_parameters(&wanted[1..]).is_err());
        assert_eq!(Mlp::new(3).unwrap().parameters().unwrap(), Mlp::new(3).unwrap().parameters().unwrap());
    }

    #[test]
    fn gradient_is_the_slope_of_the_loss() {
        let images = Digits::load(1).unwrap().training.select(&(0..32).collect::<Vec<_>>()).unwrap();
        let model = Mlp::new(1).unwrap();
        let (mut gradients, mut other) = (Vec::new(), Vec::new());
        let base = model.gradients(&images, &mut gradients).unwrap();
        // A step of length 1e-3 against the gradient must lower the loss by about 1e-3 times the gradient's length.
        let length = gradients.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt() as f32;
        let mut parameters = model.parameters().unwrap();
        parameters.iter_mut().zip(&gradients).for_each(|(p, g)| *p -= 1e-3 * g / length);
        model.set_parameters(&parameters).unwrap();
        let moved = model.gradients(&images, &mut other).unwrap();
        let (expected, found) = (1e-3 * length, base - moved);
        assert!((found / expected - 1.0).abs() < 0.05, "expected a fall by {expected}, found {found}");
    }
}
