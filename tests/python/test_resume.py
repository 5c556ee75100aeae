# SPDX-License-Identifier: MIT
"""Training that is stopped and resumed under patch(): accelerate, transformers' Trainer and
Lightning, unchanged, end with the very numbers that they end with on their own."""
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
import penstock
from support import assert_same

pytestmark = pytest.mark.slow

# Not globals of their own: these would be rebound.
REAL = SimpleNamespace(load=torch.load, save=torch.save)
STEPS = 4


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert torch.load is REAL.load and torch.save is REAL.save


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5),
                               torch.nn.Linear(16, 1))


def numbers(of=64):
    made = torch.Generator().manual_seed(5)
    return [(torch.randn(8, generator=made), torch.randn(1, generator=made)) for _ in range(of)]


def assert_same_state(mine, theirs):
    """Of tensors nested in dicts and lists, bit for bit."""
    if isinstance(theirs, torch.Tensor):
        assert_same({"": mine}, {"": theirs})
    elif isinstance(theirs, dict):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert_same_state(mine[key], value)
    elif isinstance(theirs, (list, tuple)):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs):
            assert_same_state(one, other)
    else:
        assert mine == theirs


# ------------------------------------------------------------------------------------ accelerate --

def accelerated(folder, resume):
    """Trains, saves its state half way, goes on; or goes on from what was saved."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = torch.utils.data.DataLoader(numbers(), batch_size=8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for step, (batch, wanted) in enumerate(loader):
        if step == STEPS:
            if resume:
                accelerator.load_state(folder)
            else:
                accelerator.save_state(folder)
        if step >= STEPS or not resume:
            accelerator.backward(torch.nn.functional.mse_loss(model(batch), wanted))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict()}


def test_accelerate_saves_and_loads_its_state(tmp_path):
    pytest.importorskip("accelerate")
    theirs = accelerated(tmp_path / "theirs", False)
    with penstock.patch() as held:
        mine = accelerated(tmp_path / "mine", False)
        assert held.served["torch.save"] >= 2, "optimizer and scheduler at least"
        assert held.served["safetensors.torch.save_file"] == 1
        resumed = accelerated(tmp_path / "mine", True)
        assert held.served["torch.load"] >= 2
    plain = accelerated(tmp_path / "mine", True)
    for state in mine, resumed, plain:
        assert_same_state(state, theirs)
    names = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert {path.name for path in (tmp_path / "mine").iterdir()} == names


# --------------------------------------------------------------------------------------- Trainer --

def trained(folder, resume):
    """Of a Trainer that saves a checkpoint half way: the model's weights at the end."""
    import transformers

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = network()

        def forward(self, inputs, labels):
            return {"loss": torch.nn.functional.mse_loss(self.layers(inputs), labels)}

    arguments = transformers.TrainingArguments(
        str(folder), max_steps=2 * STEPS, save_steps=STEPS, per_device_train_batch_size=8,
        use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no", seed=3,
        dataloader_num_workers=0)
    data = [{"inputs": inputs, "labels": labels} for inputs, labels in numbers()]
    trainer = transformers.Trainer(Wrapped(), arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS}") if resume else None)
    return {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}


def test_the_trainer_of_transformers_resumes(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    theirs = trained(tmp_path / "theirs", False)
    with penstock.patch() as held:
        mine = trained(tmp_path / "mine", False)
        assert held.served["torch.save"] >= 4, "optimizer, scheduler, of two checkpoints"
        resumed = trained(tmp_path / "mine", True)
        assert held.served["torch.load"] >= 2
    plain = trained(tmp_path / "mine", True)
    for state in mine, resumed, plain:
        assert_same_state(state, theirs)


# ------------------------------------------------------------------------------------- Lightning --

def lightened(folder, resume):
    """Of Lightning's Trainer, which saves a checkpoint half way."""
    import pytorch_lightning as lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = network()

        def training_step(self, batch, index):
            return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    keep = lightning.callbacks.ModelCheckpoint(folder, "half", every_n_train_steps=STEPS,
                                               save_top_k=1)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS if not resume else 2 * STEPS, logger=False,
        callbacks=[keep], enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder)
    module = Module()
    loader = torch.utils.data.DataLoader(numbers(STEPS * 8), batch_size=8)
    trainer.fit(module, loader, ckpt_path=folder / "half.ckpt" if resume else None,
                **({"weights_only": False} if resume else {}))
    return {"model": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}


@pytest.mark.filterwarnings("ignore")
def test_lightning_resumes(tmp_path):
    """It hands torch file objects, which torch itself reads and writes."""
    pytest.importorskip("pytorch_lightning")
    first = lightened(tmp_path / "theirs", False)
    theirs = lightened(tmp_path / "theirs", True)
    with penstock.patch() as held:
        assert_same_state(lightened(tmp_path / "mine", False), first)
        assert_same_state(lightened(tmp_path / "mine", True), theirs)
        assert {name for name, _ in held.handed_on} >= {"torch.save", "torch.load"}
    state = penstock.load(tmp_path / "mine/half.ckpt", weights_only=False)
    assert_same_state(state["state_dict"], theirs["model"])
