# Configuration of `enroot start`, which gives a container no variables of the host and a /tmp of its own: lets in the
# variables of the rank, except those that name files of the host, and the files that Open MPI's mpirun and ranks share.
environ() {
    local name
    for name in $(compgen -e); do
        case $name in
            PATH | LD_* | PYTHON* | VIRTUAL_ENV | CONDA_* | HOME | TMPDIR | PWD | OLDPWD | SHLVL | _ | BASH* | ENROOT_*) ;;
            *) [[ ${!name} == *$'\n'* ]] || printf '%s=%s\n' "$name" "${!name}" ;;
        esac
    done
}

mounts() {
    local path
    for path in "${TMPDIR-}" "${PMIX_SERVER_TMPDIR-}"; do
        [ ! -d "$path" ] || echo "$path $path none x-create=dir,bind"
    done
}
