# Open MPI's settings for all tests: root may start ranks, more of them than there are cores, and they use
# loopback only. The memory that PMIx shares between the processes of a machine now and then ends MPI_Init with
# a segmentation fault (openpmix/openpmix #1114): do without.
# shellcheck shell=bash
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_btl_tcp_if_include=lo OMPI_MCA_oob_tcp_if_include=lo PMIX_MCA_gds=hash
