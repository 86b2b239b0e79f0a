//! The model as data: geometry, the plan, the device trait, sessions, sampling, the f32 reference.
