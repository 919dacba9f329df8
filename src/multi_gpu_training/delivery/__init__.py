"""After training: load a trained model, evaluate it, predict with it, export it.

    import multi_gpu_training as mgt

    loaded = mgt.load("runs/image/2026-11-16_12-00-00")   # a run, a checkpoint, or its URL
    loaded.predict(["cat.jpg", "dog.jpg"])                # [{"label": "cat", "score": 0.98, ...}]
    loaded.model                                          # plain torch.nn.Module, in eval mode

`load(where, *, device="auto", checkpoint=None, model=None, trust=False, verify_key=None,
dtype="float32")` needs no launcher, and nothing of the run folder is unpickled or executed. With
`verify_key`, a key file, or with MGT_VERIFY_KEY only checkpoints that were signed with that key are
loaded. `checkpoint` is a name such as step-00000100 or best; by default the best one, else the
newest. With dtype="bf16" linear layers and convolutions keep their weights in bf16, see
`delivery.bf16_weights`. It returns a `LoadedModel`:

    loaded.recipe           image, video, speech, transformer, ppo; "custom" for a script's model
    loaded.model            the nn.Module with its weights, on its device, in eval mode
    loaded.labels           names of the classes in the order of the outputs, or None
    loaded.description      what the checkpoint says about its model (its model.json)
    loaded.checkpoint       the folder it came from; .step and .metrics as its manifest has them
    loaded.pipeline         the recipe's `recipes.pipeline.Pipeline` behind all of this

    loaded.predict(raws, task=None, batch_size=None, **options)
        one dict per raw input, in their order. Raw input is a path, a Pillow image, an array, a
        text, samples of sound, an observation, as the recipe has it. Tasks are in `loaded.tasks`,
        the first by default: generate and score for language models, act and play for PPO.
    loaded.preprocess(raws)     tensors on the host: the arguments of `program`
    loaded.program              the model as a plain function of those tensors, as it is exported
    loaded.outputs(tensors)     what the program gives, as a tuple of tensors on the host
    loaded.read(outputs, raws)  results from outputs of the program, or of an exported one
    loaded.inputs, .output_specs  names, types and shapes of both (`TensorSpec`)
    loaded.example_inputs(n)    raw inputs of the run's validation data
    loaded.example_batch(n)     tensors of those, or made-up ones where the data are gone
    loaded.evaluate(data=None, part=None, batch_size=None)
        the metrics of a validation: on the validation part of the run's own data, or on all of
        `data`, a folder as `mgt train --data-dir` takes it
    loaded.job(data=None)       the recipe's datasets, loss, metrics (`recipes.recipe.Job`) with
                                this very model in it: `manager.fit(**vars(loaded.job()))` trains it
    loaded.rebuild(**changes)   a LoadedModel of the same recipe with fresh weights and other
                                arguments, as in width=8; `loaded.description["model"]` lists them
    loaded.with_model(model)    the same surroundings with another module: pruned, quantised
    loaded.save(folder)         weights and description as a folder that `load` reads again

Every error is a `MultiGPUError` whose message says what was found and what to do.
"""
