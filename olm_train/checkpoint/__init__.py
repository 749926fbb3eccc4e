"""Checkpoints: written whole or not at all, verified before they are read, no pickle.

a run        `manager.CheckpointManager`: saves, keeps, finds where the run begins
             `policy`: what train.yaml says of it
a model      `portable.open_portable`, `weights.export`: a trained model, wherever it was copied
old formats  `convert.convert`

manager -> resume (where a run begins) -> load -> manifest, index, documents: the files
        -> save ----------------------> tensors (DCP's plan, bare bytes), folders (their names)
"""
