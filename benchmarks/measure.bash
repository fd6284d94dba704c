#!/usr/bin/env bash
# The figures of README.md and targets.md anew, raw output with its command into a folder: bash benchmarks/measure.bash OUT [NAME ...]
# Each GPU that is here takes its share of the jobs, one at a time, on its share of the cores. From the root of the project; needs liger-kernel and peft for
# the peers and models of those names. SECONDS_EACH: the time that one job may take at most.
# SEED: of the random sizes, from 1000 on and each used once.
set -u
seed=${SEED:-1001} limit=${SECONDS_EACH:-540}
out=$1 && shift && mkdir -p "$out"
jobs() {
    cat <<JOBS
rows_forward tools/bench.py --ops relu,softmax,dyt --set wide,odd --direction forward --peers eager,compile,compile-max,liger --no-host
rows_backward tools/bench.py --ops relu,softmax,dyt --set wide,odd --direction backward --peers eager,compile,compile-max,liger --no-host
mmsigmoid_forward tools/bench.py --ops mmsigmoid --set wide,odd --direction forward --peers eager,compile,compile-max
mmsigmoid_backward tools/bench.py --ops mmsigmoid --set wide,odd --direction backward --peers eager,compile,compile-max --no-host
two_mm_forward tools/bench.py --ops two_mm --set wide,odd --direction forward --peers eager,compile,compile-max
two_mm_backward tools/bench.py --ops two_mm --set wide,odd --direction backward --peers eager,compile,compile-max --no-host
attention_forward tools/bench.py --ops attention --set wide,odd --direction forward --peers sdpa,cudnn,fa2,flex --no-host
attention_backward tools/bench.py --ops attention --set wide,odd --direction backward --peers sdpa,cudnn,fa2,flex --no-host
more_forward tools/bench.py --ops rmsnorm,layernorm,swiglu,geglu,cross_entropy,rope --set more --direction forward --peers eager,compile,liger --no-host
more_backward tools/bench.py --ops rmsnorm,layernorm,swiglu,geglu,cross_entropy,rope --set more --direction backward --peers eager,compile,liger --no-host
models_train tools/bench_models.py --work train --variants sdpa,dtkernels,liger,sdpa+compile,dtkernels+compile,dtkernels:attention+compile
models_generate tools/bench_models.py --work generate --variants sdpa,dtkernels,sdpa+compile,dtkernels+compile,dtkernels:attention+compile
lora tools/lora_training.py --steps 200 --hidden 1024 --layers 8 --batch 8 --length 1024
lora_1b tools/lora_training.py --steps 30 --hidden 2048 --layers 16 --batch 4 --length 2048
host_time tools/bench_host_overhead.py
random_rows benchmarks/random_shapes.py --seed $seed --ops relu,softmax,dyt --seconds $limit
random_products benchmarks/random_shapes.py --seed $seed --ops mmsigmoid,two_mm --seconds $limit
random_attention benchmarks/random_shapes.py --seed $seed --ops attention --seconds $limit
untuned benchmarks/untuned.py --seconds $limit
kernelbench_fp32 benchmarks/kernelbench/run.py --level 1,2 --dtype fp32 --seconds $limit
kernelbench_bf16 benchmarks/kernelbench/run.py --level 1,2 --dtype bf16 --seconds $limit
liger tools/compare_liger.py
sweeps benchmarks/sweeps.py --seconds $limit
schedule_study benchmarks/schedule_study.py --seconds $limit
soak benchmarks/soak.py --seconds $limit
JOBS
}
gpus=$(nvidia-smi --list-gpus | wc -l)
[ "$gpus" -gt 0 ] || { echo "measure: no GPU" >&2; exit 1; }
cores=$(($(getconf _NPROCESSORS_ONLN) / gpus)) # nproc goes by OMP_NUM_THREADS
asked() { [ $# -eq 1 ] || case " ${*:2} " in *" $1 "*) ;; *) return 1 ;; esac; }
for gpu in $(seq 0 $((gpus - 1))); do
    (
        export CUDA_VISIBLE_DEVICES=$gpu TORCHINDUCTOR_COMPILE_THREADS=$((cores > 2 ? cores - 2 : 1))
        number=0
        while read -r name command; do
            asked "$name" "$@" && [ $((number++ % gpus)) -eq "$gpu" ] || continue
            # shellcheck disable=SC2086  # the command is words
            timeout -k 5 "${SECONDS_EACH:-3600}" taskset -c $((gpu * cores))-$((gpu * cores + cores - 1)) python3 $command --json "$out/$name.json" > "$out/$name.txt" 2>&1 < /dev/null
            echo "$name: exit status $?"
        done < <(jobs)
    ) &
done
wait
