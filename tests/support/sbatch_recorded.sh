#!/bin/bash

# Parameters
#SBATCH --array=0-2%2
#SBATCH --comment='it'"'"'s two words'
#SBATCH --cpus-per-task=4
#SBATCH --error=/sweep/.submitit/%A_%a/%A_%a_0_log.err
#SBATCH --gpus-per-node=2
#SBATCH --job-name=train
#SBATCH --mail-type=END
#SBATCH --mem=8GB
#SBATCH --nice=7
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/sweep/.submitit/%A_%a/%A_%a_0_log.out
#SBATCH --partition=long
#SBATCH --signal=USR2@60
#SBATCH --time=90
#SBATCH --wckey=submitit

# setup
module load cuda
export A=1

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /sweep/.submitit/%A_%a/%A_%a_%t_log.out --error /sweep/.submitit/%A_%a/%A_%a_%t_log.err python -u -m submitit.core._submit /sweep/.submitit/%j
