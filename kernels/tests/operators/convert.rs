//! Conversion between element types.

use crate::reference::{cases, download, garbage, upload};
use half::bf16;
use moh_kernels::{Backend, Element};

fn converted<B: Backend, X: Element, Y: Element>(device: &B, x: &[X]) -> Vec<Y> {
    let (x, mut y) = (upload(device, x), garbage::<B, Y>(device, x.len()));
    device.convert(B::whole(&x), B::whole_mut(&mut y)).unwrap();
    download::<B, Y>(device, &y)
}

#[test]
fn buffers_of_other_lengths_are_refused() {
    fn refuses<B: Backend>(device: &B) {
        let (x, mut y) = (upload(device, &[1f32; 3]), upload(device, &[bf16::ONE; 2]));
        assert!(device.convert(B::whole(&x), B::whole_mut(&mut y)).is_err());
    }
    on_each_device!(device => refuses(device));
}

proptest::proptest! {
    #![proptest_config(cases(64))]
    #[test]
    fn elements_are_rounded_to_nearest_and_widened_exactly(
        bits in proptest::collection::vec(proptest::num::f32::NORMAL, 0..300)
    ) {
        let narrow: Vec<bf16> = bits.iter().map(|&x| bf16::from_f32(x)).collect();
        let wide: Vec<f32> = narrow.iter().map(|x| x.to_f32()).collect();
        on_each_device!(device => {
            assert_eq!(converted::<_, f32, bf16>(device, &bits), narrow);
            assert_eq!(converted::<_, bf16, f32>(device, &narrow), wide);
            assert_eq!(converted::<_, f32, f32>(device, &bits), bits);
        });
    }
}
