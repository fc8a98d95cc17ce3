//! Tables of variables and the role, or the error, that follows from them.

use super::slurm::first_host;
use super::*;

fn variables(text: &str) -> Variables {
    let pair = |word: &str| word.split_once('=').map(|(name, value)| (name.to_owned(), value.replace('~', " ")));
    text.split_whitespace().map(|word| pair(word).unwrap()).collect()
}

fn role(text: &str) -> Result<Role> {
    detect(&variables(text), LauncherChoice::Auto, None)
}

fn asked(text: &str, launcher: &str, workers: Option<usize>) -> Result<Role> {
    detect(&variables(text), launcher.parse().unwrap(), workers.map(|n| ("--cpus", n)))
}

const TORCHRUN: &str = "RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 MASTER_ADDR=10.0.0.1 \
                        MASTER_PORT=29500";
const SLURM: &str = "SLURM_JOB_ID=77 SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_NTASKS=8 SLURM_NNODES=2 \
                     SLURM_NODEID=1 SLURM_TASKS_PER_NODE=4(x2) SLURM_JOB_NODELIST=gpu[07-08]";
const OPEN_MPI: &str = "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=2 \
                        OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_NAMESPACE=123";
const KUBEFLOW: &str = "PET_NNODES=3 PET_NODE_RANK=1 PET_NPROC_PER_NODE=4 MASTER_ADDR=job-master-0 MASTER_PORT=23456 \
                        RANK=1 WORLD_SIZE=3";

#[test]
fn the_launcher_of_a_worker_is_recognised() {
    let table: &[(&str, &str)] = &[
        ("", "started by no launcher: workers start from here"),
        // Set for other programs, or left behind by a shell: not evidence of a launcher.
        ("MASTER_ADDR=h MASTER_PORT=1", "started by no launcher: workers start from here"),
        ("RANK= WORLD_SIZE=", "started by no launcher: workers start from here"),
        (
            TORCHRUN,
            "started by RANK, WORLD_SIZE and LOCAL_RANK: rank 5 of 8, local rank 1 of 4, node 1, rank 0 at 10.0.0.1:29500",
        ),
        (
            "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=5 TORCHELASTIC_RUN_ID=x",
            "started by torchrun: rank 0 of 2, local rank 0 of 2, node 0, rank 0 at h:5",
        ),
        (
            "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=5 TORCHELASTIC_RUN_ID=x \
             TORCHELASTIC_USE_AGENT_STORE=True",
            "started by torchrun: rank 0 of 2, local rank 0 of 2, node 0, rank 0 at h, port from the job's id",
        ),
        (
            "RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=5",
            "started by RANK, WORLD_SIZE and LOCAL_RANK: rank 1 of 2, local rank 1 of 2, node 0, rank 0 at 127.0.0.1:5",
        ),
        (
            "TRAINER_WORKER=9 RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 MASTER_ADDR=127.0.0.1 \
             MASTER_PORT=5 SLURM_PROCID=0 SLURM_NTASKS=1",
            "started by this program's launcher: rank 1 of 2, local rank 1 of 2, node 0, rank 0 at 127.0.0.1:5",
        ),
        (SLURM, "started by Slurm: rank 5 of 8, local rank 1 of 4, node 1, rank 0 at gpu07, port from the job's id"),
        (
            "SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NTASKS=2 SLURM_JOB_NODELIST=a SLURM_JOB_ID=1 MASTER_PORT=7000",
            "started by Slurm: rank 1 of 2, local rank 1 of 2, node 0, rank 0 at 127.0.0.1:7000",
        ),
        // A step that is smaller than its allocation.
        (
            "SLURM_PROCID=2 SLURM_LOCALID=0 SLURM_NTASKS=3 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_NUM_NODES=2 SLURM_NODEID=1 \
             SLURM_NNODES=4 SLURM_TASKS_PER_NODE=4(x4) SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_STEP_NODELIST=b[3,9] \
             SLURM_JOB_NODELIST=b[1-4] SLURM_JOB_ID=1",
            "started by Slurm: rank 2 of 3, local rank 0 of 1, node 1, rank 0 at b3, port from the job's id",
        ),
        // Only the list has the number of nodes.
        (
            "SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NTASKS=4 SLURM_JOB_NODELIST=x[1-2] SLURM_JOB_ID=1",
            "started by Slurm: rank 3 of 4, local rank 1 of 2, rank 0 at x1, port from the job's id",
        ),
        // The shell of salloc, and a script of sbatch without srun.
        ("SLURM_JOB_ID=5 SLURM_NTASKS=4 SLURM_JOB_NODELIST=x", "started by no launcher: workers start from here"),
        (
            "SLURM_JOB_ID=5 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1 ENVIRONMENT=BATCH",
            "started by no launcher: workers start from here",
        ),
        (
            OPEN_MPI,
            "started by Open MPI: rank 2 of 4, local rank 2 of 4, node 0, rank 0 at 127.0.0.1, port from the job's id",
        ),
        (
            "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2",
            "started by Open MPI: rank 2 of 4, local rank 0 of 2, MASTER_ADDR not set",
        ),
        (
            "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1 MASTER_ADDR=h MASTER_PORT=9",
            "started by MPICH (PMI): rank 1 of 2, local rank 0 of 1, rank 0 at h:9",
        ),
        (
            "PMI_RANK=1 PMI_SIZE=2",
            "started by MPICH (PMI): rank 1 of 2, local rank 1 of 2, node 0, rank 0 at 127.0.0.1, port from the job's id",
        ),
        (KUBEFLOW, "started by Kubeflow: node 1 of 3, 4 workers on it, node 0 at job-master-0:23456"),
        (
            "PET_NNODES=2 PET_NODE_RANK=0 PET_NPROC_PER_NODE=auto PET_MASTER_ADDR=m",
            "started by Kubeflow: node 0 of 2, node 0 at m:29500",
        ),
        // torchrun has started this process inside a pod.
        (
            "PET_NNODES=1 RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=m MASTER_PORT=4",
            "started by RANK, WORLD_SIZE and LOCAL_RANK: rank 1 of 2, local rank 1 of 2, node 0, rank 0 at m:4",
        ),
        (
            "JSM_NAMESPACE_RANK=1 JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=2 LSB_JOBID=7 \
             MASTER_ADDR=a",
            "started by LSF's jsrun: rank 1 of 4, local rank 1 of 2, rank 0 at a, port from the job's id",
        ),
        // Two launchers agree: the more specific one counts.
        (
            "PMI_RANK=1 PMI_SIZE=2 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_JOB_NODELIST=a,b \
             SLURM_JOB_ID=3",
            "started by Slurm: rank 1 of 2, local rank 0 of 1, rank 0 at a, port from the job's id",
        ),
        // srun has started torchrun: torchrun's variables take precedence.
        (
            "RANK=3 LOCAL_RANK=3 WORLD_SIZE=4 LOCAL_WORLD_SIZE=4 GROUP_RANK=0 MASTER_ADDR=h MASTER_PORT=5 \
             TORCHELASTIC_RUN_ID=x SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1 SLURM_STEP_ID=0",
            "started by torchrun: rank 3 of 4, local rank 3 of 4, node 0, rank 0 at h:5",
        ),
    ];
    for (text, expected) in table {
        let found = role(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(found.to_string(), *expected, "{text}");
    }
}

#[test]
fn contradictions_are_refused_with_cause_and_hint() {
    let table: &[(&str, &str, &str)] = &[
        // Variables that are missing.
        ("RANK=1", "RANK=1 is set but WORLD_SIZE is not", "set WORLD_SIZE too"),
        ("WORLD_SIZE=2", "WORLD_SIZE=2 is set but RANK is not", "set RANK too"),
        ("LOCAL_RANK=0", "LOCAL_RANK=0 is set but RANK is not", "set RANK too"),
        ("RANK=1 WORLD_SIZE=2", "LOCAL_RANK is not: they may count pods", "--node-rank"),
        (
            "RANK=1 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1",
            "LOCAL_RANK=0 is set but LOCAL_WORLD_SIZE is not",
            "set LOCAL_WORLD_SIZE",
        ),
        ("TRAINER_WORKER=9 RANK=1", "TRAINER_WORKER=9 is set but LOCAL_RANK is not", "LOCAL_RANK"),
        ("SLURM_PROCID=1", "SLURM_PROCID=1 is set but SLURM_NTASKS is not", "SLURM_NTASKS"),
        ("SLURM_PROCID=1 SLURM_NTASKS=2", "SLURM_PROCID=1 is set but SLURM_LOCALID is not", "SLURM_LOCALID"),
        ("OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_RANK=1 is set but OMPI_COMM_WORLD_SIZE is not", "set"),
        ("JSM_NAMESPACE_SIZE=4", "JSM_NAMESPACE_SIZE=4 is set but JSM_NAMESPACE_RANK is not", "set JSM_NAMESPACE_RANK"),
        ("PMI_SIZE=4", "PMI_SIZE=4 is set but PMI_RANK is not", "set PMI_RANK"),
        ("PMI_RANK=0 PMI_SIZE=4 MPI_LOCALRANKID=0", "MPI_LOCALRANKID=0 is set but MPI_LOCALNRANKS is not", "set"),
        ("PET_NNODES=2 MASTER_ADDR=h", "PET_NNODES=2 is set but PET_NODE_RANK is not", "set PET_NODE_RANK"),
        ("PET_NNODES=2 PET_NODE_RANK=0", "PET_NNODES=2 is set but MASTER_ADDR is not", "set MASTER_ADDR"),
        ("PET_NPROC_PER_NODE=2", "PET_NPROC_PER_NODE=2 is set but PET_NNODES is not", "set PET_NNODES"),
        // Values that are not numbers, or out of range.
        ("RANK=one LOCAL_RANK=0 WORLD_SIZE=2", "RANK=one is not a whole number", "unset it"),
        ("RANK=-1 LOCAL_RANK=0 WORLD_SIZE=2", "RANK=-1 is not a whole number", "unset it"),
        ("RANK=2 LOCAL_RANK=0 WORLD_SIZE=2", "RANK=2 is not below WORLD_SIZE=2", "count from 0"),
        ("RANK=0 LOCAL_RANK=0 WORLD_SIZE=0", "RANK=0 is not below WORLD_SIZE=0", "count from 0"),
        (
            "RANK=1 LOCAL_RANK=2 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2",
            "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2",
            "another job",
        ),
        (
            "RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=4",
            "LOCAL_WORLD_SIZE=4 is more than WORLD_SIZE=2",
            "another job",
        ),
        ("RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_PORT=70000", "MASTER_PORT=70000 is not a port", "65535"),
        ("SLURM_PROCID=4 SLURM_LOCALID=0 SLURM_NTASKS=4", "SLURM_PROCID=4 is not below SLURM_NTASKS=4", "count from 0"),
        ("PMI_RANK=9 PMI_SIZE=4", "PMI_RANK=9 is not below PMI_SIZE=4", "count from 0"),
        (
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=2",
            "OMPI_COMM_WORLD_LOCAL_RANK=3 is not below OMPI_COMM_WORLD_LOCAL_SIZE=2",
            "another job",
        ),
        ("PET_NNODES=2 PET_NODE_RANK=2 MASTER_ADDR=h", "PET_NODE_RANK=2 is not below PET_NNODES=2", "count from 0"),
        ("PET_NNODES=1 PET_NPROC_PER_NODE=0", "PET_NPROC_PER_NODE=0 asks for no workers", "nprocPerNode"),
        // Values that contradict each other, or that no job has.
        (
            "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1000000000 LOCAL_WORLD_SIZE=1 MASTER_ADDR=h MASTER_PORT=1",
            "WORLD_SIZE=1000000000 is more ranks than a job may have, 65536",
            "correct it",
        ),
        (
            "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=99999999",
            "SLURM_NTASKS=99999999 is more ranks than a job may have",
            "correct it",
        ),
        ("PET_NNODES=1:3 PET_NODE_RANK=0 MASTER_ADDR=h", "PET_NNODES=1:3 asks for an elastic job", "fixed number"),
        ("PET_NNODES=3 PET_NODE_RANK=1 RANK=2 MASTER_ADDR=h", "RANK=2 and PET_NODE_RANK=1 disagree", "LOCAL_RANK"),
        (
            "PET_NNODES=2 PET_NODE_RANK=1 MASTER_ADDR=a PET_MASTER_ADDR=b",
            "MASTER_ADDR=a and PET_MASTER_ADDR=b disagree",
            "unset",
        ),
        (
            "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=4 ENVIRONMENT=BATCH",
            "SLURM_NTASKS=4, but this process was started by the batch script",
            "srun",
        ),
        (
            "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=4 SLURM_JOB_NODELIST=a[1-",
            "SLURM_JOB_NODELIST=a[1-: a [ is not closed",
            "node[",
        ),
        ("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=5 SLURM_NNODES=2", "5 tasks on 2 nodes", "--ntasks-per-node"),
        (
            "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NTASKS=4",
            "disagree about this process: RANK=0 of WORLD_SIZE=2, LOCAL_RANK=0, but SLURM_PROCID=1 of SLURM_NTASKS=4",
            "--launcher env or --launcher slurm",
        ),
        (
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=4 \
             SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1",
            "Open MPI and Slurm disagree",
            "--launcher mpi or --launcher slurm",
        ),
    ];
    for (text, cause, hint) in table {
        let Err(error) = role(text) else { panic!("{text}: was not refused") };
        assert!(error.message.contains(cause), "{text}: {error}");
        assert!(error.hint.contains(hint), "{text}: {error}");
        assert_eq!(error.code, 2, "{text}");
        assert!(matches!(asked(text, "local", None), Ok(Role::Launcher)) || text.starts_with("TRAINER"), "{text}");
    }
}

#[test]
fn the_command_line_must_agree_with_the_launcher() {
    let one_task = "SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1";
    let error = asked(one_task, "auto", Some(4)).unwrap_err();
    assert_eq!(error.message, "--cpus 4, but Slurm has started this process as the only task of its allocation");
    assert_eq!(error.hint, "leave --cpus out to be that worker, or say --launcher local to start 4 workers from here");
    assert_eq!(asked(one_task, "local", Some(4)), Ok(Role::Launcher));
    assert!(asked(one_task, "auto", Some(1)).is_ok());
    // With --cpus a user may mean all ranks, or those of a host.
    for (workers, fine) in [(8, true), (4, true), (2, false)] {
        assert_eq!(asked(TORCHRUN, "auto", Some(workers)).is_ok(), fine, "{workers}");
    }
    assert!(asked(KUBEFLOW, "auto", Some(2)).unwrap_err().message.contains("PET_NPROC_PER_NODE=4"));
    // --launcher chooses one of two launchers that disagree.
    let both = format!("{OPEN_MPI} {SLURM}");
    for (launcher, world_size) in [("mpi", 4), ("slurm", 8)] {
        let Ok(Role::Worker(worker)) = asked(&both, launcher, None) else { panic!("{launcher}") };
        assert_eq!(worker.world_size, world_size);
    }
    assert!(matches!(asked(KUBEFLOW, "env", None), Ok(Role::KubeflowLauncher(_))));
    // The chosen launcher has set no variables.
    for (launcher, cause) in [
        ("env", "--launcher env: RANK, WORLD_SIZE and LOCAL_RANK are not set"),
        ("slurm", "--launcher slurm: SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID are not set"),
        ("lsf", "--launcher lsf: jsrun's JSM_NAMESPACE_RANK and JSM_NAMESPACE_SIZE are not set"),
        ("mpi", "--launcher mpi: neither Open MPI's OMPI_COMM_WORLD_RANK nor MPICH's PMI_RANK is set"),
    ] {
        assert_eq!(asked("", launcher, None).unwrap_err().message, cause);
    }
    assert!("ssh".parse::<LauncherChoice>().unwrap_err().message.contains("--launcher ssh"));
}

#[test]
fn jobs_are_distinguished() {
    let words = |text: &str| match role(text).unwrap() {
        Role::Worker(worker) => worker.job,
        _ => panic!("{text}"),
    };
    assert_eq!(words(SLURM), ["slurm", "77", "0"]);
    assert_ne!(words(SLURM), words(&SLURM.replace("STEP_ID=0", "STEP_ID=1")));
    assert_ne!(words(OPEN_MPI), words(&OPEN_MPI.replace("123", "124")));
    assert_ne!(words(TORCHRUN), words(&TORCHRUN.replace("29500", "29501")));
    // Without an id or a port there are no words: all such jobs would share them.
    assert_eq!(words("PMI_RANK=1 PMI_SIZE=2"), [""; 0]);
    assert_eq!(words("RANK=0 LOCAL_RANK=0 WORLD_SIZE=2"), [""; 0]);
}

#[test]
fn host_lists_give_their_first_host() {
    for (list, first) in [
        ("login1", "login1"),
        ("a,b,c", "a"),
        ("node[07-09,12]", "node07"),
        ("node[3,1-2],login", "node3"),
        ("rack[1-2]-n[05,07].cluster", "rack1-n05.cluster"),
        ("login,node[1-4]", "login"),
    ] {
        assert_eq!(first_host(list).as_deref(), Ok(first), "{list}");
    }
    for (list, cause) in [
        ("", "a host's name is empty"),
        ("a,,b", "a host's name is empty"),
        ("a[1-2", "a [ is not closed"),
        ("a1-2]", "a ] has no ["),
        ("a[[1]]", "a [ is inside another"),
        ("a[x]", "`x` is not a range of numbers"),
        ("a[]", "`` is not a range of numbers"),
    ] {
        assert_eq!(first_host(list), Err(cause.to_owned()), "{list}");
    }
}

proptest::proptest! {
    #[test]
    fn no_list_of_hosts_panics(list in "[a-c\\[\\],0-9-]{0,24}") {
        let _ = first_host(&list);
        let _ = detect(
            &variables(&format!("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=4 SLURM_JOB_NODELIST=x{list}")),
            LauncherChoice::Auto,
            None,
        );
    }
}
